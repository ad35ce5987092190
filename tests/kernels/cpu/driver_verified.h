// One random case of drafts checked by their odds: 0, or 1 after a line that says what is wrong.
#pragma once

#include <random>

int check_checked(std::mt19937& noise);
