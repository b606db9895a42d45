// What a consumer of tutti::checkpoint builds: a number that is saved, lost and loaded, and a file of weights.
// Usage: <program> <folder>
#include <tutti/checkpoint/checkpoint.hpp>
#include <tutti/checkpoint/safetensors.hpp>

#include <cstdint>  // the number
#include <cstdio>   // printf
#include <string>   // path
#include <vector>   // entries

#include <tutti/comm/self.hpp>  // one rank

int main(int, char** argv) {
    std::uint64_t number = 3;
    tutti::comm::self<> comm;
    tutti::checkpoint::contents<tutti::host_queue> contents;
    contents.add(tutti::state_of("number", tutti::view<std::uint64_t>(&number, 1)),
                 tutti::checkpoint::ownership::replicated);
    tutti::checkpoint::saver saver(comm.duplicate("save"), argv[1]);
    saver.save(7, contents);
    number = 0;
    static_cast<void>(saver.wait());
    const auto loaded = tutti::checkpoint::load(comm, argv[1], {}, contents);
    std::printf("step %d comes back: %d\n", static_cast<int>(loaded->step), static_cast<int>(number));

    const std::string path = std::string(argv[1]) + "/weights.safetensors";
    const std::vector entries{tutti::state_of("number", tutti::view<std::uint64_t>(&number, 1))};
    tutti::checkpoint::write_safetensors(path, entries);
    const tutti::checkpoint::safetensors_file file(path);
    std::printf("weights.safetensors has %d tensor\n", static_cast<int>(file.tensors().size()));
}
