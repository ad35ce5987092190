// One random case of attention over a paged cache: 0, or 1 after a line that says what is wrong.
#pragma once

#include <random>

int check_attention(std::mt19937& noise);
