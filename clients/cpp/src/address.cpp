#include "address.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>
#include <sstream>
#include <vector>

#include "omni_grpc/error.hpp"

namespace omni::internal {
namespace {

struct HostPort {
  std::string host;
  std::string port;
};

[[noreturn]] void Refuse(const std::string& address, const std::string& rule) {
  throw InvalidField("address", "'" + address + "' " + rule);
}

bool StartsWith(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Each HOST:PORT of an address; none where gRPC finds the server by other means.
std::vector<std::string> HostsAndPorts(const std::string& address) {
  const auto colon = address.find(':');
  const std::string scheme = address.substr(0, colon);
  for (const char* other : {"unix", "unix-abstract", "vsock", "xds", "google-c2p"}) {
    if (colon != std::string::npos && scheme == other) return {};
  }
  if (scheme != "dns" && scheme != "ipv4" && scheme != "ipv6") {
    if (address.find("://") != std::string::npos) Refuse(address, "is a URL; write HOST:PORT");
    return {address};
  }
  std::string rest = address.substr(colon + 1);
  if (StartsWith(rest, "//")) {
    const auto slash = rest.find('/', 2);
    rest = slash == std::string::npos ? "" : rest.substr(slash + 1);
  }
  std::vector<std::string> found;
  std::istringstream parts(rest);
  for (std::string part; std::getline(parts, part, ',');) found.push_back(part);
  if (found.empty()) Refuse(address, "has no host");
  return found;
}

HostPort Split(const std::string& address) {
  HostPort parts;
  if (StartsWith(address, "[")) {
    const auto end = address.find("]:");
    if (end == std::string::npos) Refuse(address, "has no port; write [::1]:50051");
    parts = {address.substr(1, end - 1), address.substr(end + 2)};
  } else {
    const auto colons = std::count(address.begin(), address.end(), ':');
    if (colons > 1) Refuse(address, "is not HOST:PORT; write an IPv6 address as [::1]:50051");
    if (colons == 0) Refuse(address, "has no port; write " + (address.empty() ? "localhost" : address) + ":50051");
    const auto colon = address.find(':');
    parts = {address.substr(0, colon), address.substr(colon + 1)};
  }
  if (parts.host.empty()) Refuse(address, "has no host; write localhost:" + parts.port);
  const bool blank = std::any_of(address.begin(), address.end(), [](unsigned char c) { return std::isspace(c); });
  if (blank) Refuse(address, "has blanks in it; leave them out");
  const bool digits = !parts.port.empty() && parts.port.size() <= 5 &&
                      std::all_of(parts.port.begin(), parts.port.end(), [](unsigned char c) { return std::isdigit(c); });
  const int port = digits ? std::stoi(parts.port) : 0;
  if (port < 1 || port > 65535) Refuse(address, "has the port '" + parts.port + "'; a port is a number from 1 to 65535");
  return parts;
}

bool IsLoopback(std::string host) {
  in_addr four{};
  if (inet_pton(AF_INET, host.c_str(), &four) == 1) {
    const auto number = ntohl(four.s_addr);
    return (number >> 24) == 127 || number == 0;
  }
  in6_addr six{};
  if (inet_pton(AF_INET6, host.c_str(), &six) == 1) {
    if (IN6_IS_ADDR_V4MAPPED(&six)) return six.s6_addr[12] == 127;
    return IN6_IS_ADDR_LOOPBACK(&six) || IN6_IS_ADDR_UNSPECIFIED(&six);
  }
  std::transform(host.begin(), host.end(), host.begin(), [](unsigned char c) { return std::tolower(c); });
  if (!host.empty() && host.back() == '.') host.pop_back();
  for (const char* name : {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}) {
    if (host == name) return true;
  }
  return EndsWith(host, ".localhost");
}

}  // namespace

void CheckAddress(const std::string& address) {
  for (const std::string& one : HostsAndPorts(address)) Split(one);
}

bool IsUnix(const std::string& address) {
  return StartsWith(address, "unix:") || StartsWith(address, "unix-abstract:");
}

bool IsLocal(const std::string& address) {
  if (IsUnix(address)) return true;
  const auto hosts = HostsAndPorts(address);
  return !hosts.empty() &&
         std::all_of(hosts.begin(), hosts.end(), [](const std::string& one) { return IsLoopback(Split(one).host); });
}

}  // namespace omni::internal
