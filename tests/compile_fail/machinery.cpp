// The smallest source with sections: what the compile-fail tests test themselves with. The template is there because a
// mistake must also be found where it shows only on instantiation.
#include <tutti/version.hpp>  // version_number

template <class T> constexpr T checked(T value) {
    static_assert(sizeof(T) == sizeof(int), "a version is a number");
    return value;
}

int number() {
#ifdef NOT_AN_INT
    return static_cast<int>(checked('1'));
#endif
#ifdef COMPILES
    return checked(0);
#endif
    return checked(tutti::version_number);
}
