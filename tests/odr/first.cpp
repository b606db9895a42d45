#include "look.hpp"  // look()

seen seen_by_first() { return look(); }
