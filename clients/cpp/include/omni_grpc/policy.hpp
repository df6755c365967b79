// How calls are repeated, and how a lost stream is resumed.
#pragma once

#include "omni_grpc/error.hpp"

namespace omni {

// How a stream that broke off is resumed. After `attempts` in a row without a single message, Error (UNAVAILABLE,
// STREAM_LOST) is thrown. The delay before attempt n is first_delay * 2^n, at most longest_delay, times a random number
// from 0.5 to 1, so that the clients of a server that restarts do not all come back at once.
struct Reconnect {
  int attempts = 8;
  Seconds first_delay{0.2};
  Seconds longest_delay{5.0};
};

// How a call that failed before its first message is repeated. That makes no second job, since every request has a
// request_id.
struct Retry {
  // UNAVAILABLE: at least this many attempts (1: no retry), and more of them until `window` is over.
  int attempts = 4;
  Seconds window{5.0};
  Seconds first_delay{0.2};
  Seconds longest_delay{1.0};
  // RESOURCE_EXHAUSTED with RetryInfo: how often the client waits for as long as the server says. 0 turns it off.
  int exhausted = 5;
};

}  // namespace omni
