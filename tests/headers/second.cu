#include "look.hpp"  // look()

seen seen_by_second() { return look(); }
