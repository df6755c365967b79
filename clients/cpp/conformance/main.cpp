// Reads one behaviour from standard input, and says what came of it on standard output.
#include "behaviours.hpp"

#include <exception>
#include <iostream>

int main() {
  try {
    std::cout << Show(nlohmann::json::parse(std::cin)).dump() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
