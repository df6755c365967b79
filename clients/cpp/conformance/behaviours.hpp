// The behaviours of clients/conformance/README.md.
#pragma once

#include <nlohmann/json.hpp>

// What a behaviour says about itself; throws std::invalid_argument for one that is not known.
nlohmann::json Show(const nlohmann::json& asked);
