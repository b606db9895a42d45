// cuDNN as the library of attention of this program, by the C++ compiler: the headers of its frontend take long.
#include <tutti/sequence/cudnn_attention.hpp>
