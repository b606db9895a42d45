// formatted: placeholders and arguments that do not fit each other.
#include <string>  // results

#include <tutti/core/text.hpp>  // under test

using tutti::formatted;

struct no_text {};

std::string texts() {
    std::string all = formatted("{} of {}", 1, 2);
#ifdef TOO_FEW
    all += formatted("{} of {}", 1);
#endif
#ifdef TOO_MANY
    all += formatted("{} of", 1, 2);
#endif
#ifdef NUMBER_TOO_LARGE
    all += formatted("{0} of {2}", 1, 2);
#endif
#ifdef OPEN_BRACE
    all += formatted("{} of {", 1, 2);
#endif
#ifdef CLOSING_BRACE
    all += formatted("{} of }", 1);
#endif
#ifdef NO_TEXT
    all += formatted("{}", no_text{});
#endif
    return all;
}
