#include "credentials.hpp"

#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>

#include "address.hpp"

namespace omni::internal {
namespace {

std::string Read(const char* field, const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) {
    throw InvalidField(field, path + ": " + (errno != 0 ? std::strerror(errno) : "cannot be read"));
  }
  return text;
}

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

Certificate FirstCertificate(const std::string& pem) {
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), &BIO_free);
  return {PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr), &X509_free};
}

// Without it OpenSSL asks on the terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

Key PrivateKey(const std::string& pem) {
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), &BIO_free);
  return {PEM_read_bio_PrivateKey(bio.get(), nullptr, &NoPassphrase, nullptr), &EVP_PKEY_free};
}

void CheckToken(const std::string& address, const ClientOptions& options, bool tls) {
  if (options.token.empty() && !options.token_source) return;
  if (!options.token.empty() && options.token_source) {
    throw InvalidField("token", "is given beside token_source; give one of them");
  }
  if (!tls && !options.insecure && !IsLocal(address)) {
    throw InvalidField("token",
                       "would go to " + address +
                           " unencrypted, where anybody on the way can take it: give ca, or tls for a certificate that "
                           "everybody trusts, or insecure",
                       "TOKEN_NEEDS_TLS");
  }
  if (!options.token.empty()) CheckedToken(options.token);
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> Credentials(const std::string& address, const ClientOptions& options) {
  if (options.cert.empty() != options.key.empty()) {
    throw InvalidField(options.key.empty() ? "key" : "cert", "is missing: a client certificate needs cert and key");
  }
  const bool tls = options.tls || !options.ca.empty() || !options.cert.empty();
  if (tls && IsUnix(address)) {
    throw InvalidField("tls", address + " is a Unix socket, which is never encrypted: leave out ca, cert, key and tls");
  }
  CheckToken(address, options, tls);
  if (!tls) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions files;
  if (!options.ca.empty()) {
    files.pem_root_certs = Read("ca", options.ca);
    // gRPC would say nothing, and reach no server
    if (!FirstCertificate(files.pem_root_certs)) throw InvalidField("ca", options.ca + " has no certificates in PEM");
  }
  if (!options.cert.empty()) {
    files.pem_private_key = Read("key", options.key);
    files.pem_cert_chain = Read("cert", options.cert);
    const Certificate certificate = FirstCertificate(files.pem_cert_chain);
    const Key key = PrivateKey(files.pem_private_key);
    if (!certificate || !key || X509_check_private_key(certificate.get(), key.get()) != 1) {
      throw InvalidField("key", options.key + " is not the private key of " + options.cert +
                                    ", in PEM and without a passphrase");
    }
  }
  return grpc::SslCredentials(files);
}

std::function<std::string()> TokenSource(const ClientOptions& options) {
  if (options.token_source) return options.token_source;
  if (options.token.empty()) return {};
  return [token = options.token] { return token; };
}

std::string CheckedToken(const std::string& text) {
  constexpr const char* kBlanks = " \t\r\n";
  const auto first = text.find_first_not_of(kBlanks);
  const std::string token =
      first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
  const bool printable = std::all_of(token.begin(), token.end(), [](char c) { return c > ' ' && c < 127; });
  if (token.empty() || !printable) {
    throw InvalidField("token", "is empty, or has characters that no token has (spaces, line ends)");
  }
  return token;
}

}  // namespace omni::internal
