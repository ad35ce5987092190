// One random case of a step with drafts: 0, or 1 after a line that says what is wrong.
#pragma once

#include <random>

int check_speculation(std::mt19937& noise);
