// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Symbols that a newer GCC or glibc makes a library ask for, and that the
// systems of the wheel's manylinux tag lack. Linked into the extension, where
// the version script keeps them local.

#include <new>
#include <sstream>

extern "C" {
// glibc 2.32, asked for by std::shared_ptr: nonzero means that the process has
// one thread only. Zero is always right.
char __libc_single_threaded = 0;
}

namespace std {

// GCC 11, asked for by std::vector.
void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }

}  // namespace std

// GCC 9 (default constructors) and GCC 11 (C++20's str() &&): the string
// streams, instantiated here instead of asked for.
template class std::basic_stringbuf<char>;
template class std::basic_istringstream<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
