// Errors, delays, addresses, tokens, names and requests; needs no server.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>

#include <google/rpc/error_details.pb.h>
#include <omni_grpc/client.hpp>

#include "address.hpp"
#include "credentials.hpp"
#include "digest.hpp"
#include "failure.hpp"
#include "retry.hpp"
#include "stream_impl.hpp"

using namespace omni;
using namespace omni::internal;

namespace {

template <class Call>
Failure FailureOf(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.failure();
  }
  FAIL("nothing was thrown");
  return {};
}

google::rpc::Status Detailed() {
  google::rpc::Status status;
  status.set_code(8);
  status.set_message("the queue is full");
  google::rpc::ErrorInfo info;
  info.set_reason("QUEUE_FULL");
  (*info.mutable_metadata())["job_id"] = "j1";
  status.add_details()->PackFrom(info);
  google::rpc::BadRequest bad;
  auto* violation = bad.add_field_violations();
  violation->set_field("width");
  violation->set_description("is 63");
  status.add_details()->PackFrom(bad);
  google::rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(1);
  retry.mutable_retry_delay()->set_nanos(500'000'000);
  status.add_details()->PackFrom(retry);
  status.add_details()->set_type_url("type.googleapis.com/some.Unknown");
  return status;
}

CallFailure Lost() { return FromCall(grpc::Status(grpc::StatusCode::UNAVAILABLE, "refused"), "localhost:1"); }

}  // namespace

TEST_CASE("an error has what the details of the status say") {
  const google::rpc::Status status = Detailed();
  const grpc::Status call(grpc::StatusCode::RESOURCE_EXHAUSTED, "short", status.SerializeAsString());
  const CallFailure ended = FromCall(call, "localhost:1");
  CHECK(ended.from_server);
  const Error error(ended.failure);
  CHECK(error.code() == Code::ResourceExhausted);
  CHECK(error.reason() == "QUEUE_FULL");
  CHECK(error.message() == "the queue is full");
  REQUIRE(error.violations().size() == 1);
  CHECK(error.violations()[0].field == "width");
  CHECK(error.retry_after()->count() == doctest::Approx(1.5));
  CHECK(error.metadata().at("job_id") == "j1");
  CHECK(error.job_id() == "j1");
  CHECK(std::string(error.what()) == "RESOURCE_EXHAUSTED QUEUE_FULL: the queue is full");
}

TEST_CASE("a status without details is of the connection") {
  const CallFailure lost = Lost();
  CHECK(lost.lost());
  CHECK(lost.failure.reason == "SERVER_UNREACHABLE");
  const CallFailure late = FromCall(grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, ""), "localhost:1");
  CHECK(late.timed_out());
  CHECK(late.failure.reason == "CALL_DEADLINE");
  CHECK(FromCall(grpc::Status(grpc::StatusCode::INTERNAL, "RST_STREAM"), "localhost:1").lost());
  google::rpc::Status odd;
  odd.set_code(99);
  CHECK(DecodeStatus(odd).code == Code::Unknown);
}

TEST_CASE("UNAVAILABLE is retried four times, and on until the window is over") {
  CallRetry retry{Retry{}};
  const Deadline none(std::nullopt);
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto delay = retry.Delay(Lost(), none, Seconds(60));
    REQUIRE(delay);
    CHECK(delay->count() >= 0.1 * (1 << attempt));
    CHECK(delay->count() <= 0.2 * (1 << attempt));
  }
  CHECK_FALSE(retry.Delay(Lost(), none, Seconds(60)));
  CHECK(retry.Delay(Lost(), none, Seconds(2)));
}

TEST_CASE("a full queue is waited for as RetryInfo says, five times, within the deadline") {
  const CallFailure full{DecodeStatus(Detailed()), true};
  CallRetry retry{Retry{}};
  const Deadline none(std::nullopt);
  CHECK_FALSE(retry.Delay(full, Deadline(Seconds(1)), Seconds(0)));
  for (int attempt = 0; attempt < 4; ++attempt) CHECK(retry.Delay(full, none, Seconds(0))->count() == 1.5);
  CHECK_FALSE(retry.Delay(full, none, Seconds(0)));
  Retry off;
  off.exhausted = 0;
  CHECK_FALSE(CallRetry(off).Delay(full, none, Seconds(0)));
}

TEST_CASE("what the server refuses is not retried") {
  google::rpc::Status status;
  status.set_code(3);
  CHECK_FALSE(CallRetry(Retry{}).Delay({DecodeStatus(status), true}, Deadline(std::nullopt), Seconds(0)));
}

TEST_CASE("addresses") {
  for (const char* good : {"localhost:50051", "[::1]:1", "unix:/run/a.sock", "dns:///host:1", "10.0.0.1:65535"}) {
    CAPTURE(good);
    CHECK_NOTHROW(CheckAddress(good));
  }
  for (const char* bad : {"localhost", "http://localhost:1", "localhost:0", "localhost:70000", ":1", "::1:2", "a b:1"}) {
    CAPTURE(bad);
    CHECK(FailureOf([&] { CheckAddress(bad); }).violations.at(0).field == "address");
  }
  for (const char* local : {"localhost:1", "127.9.9.9:1", "[::1]:1", "a.localhost:1", "unix:/run/a.sock"}) {
    CAPTURE(local);
    CHECK(IsLocal(local));
  }
  for (const char* far : {"server.example:1", "10.0.0.1:1", "dns:///server.example:1", "[2001:db8::1]:1"}) {
    CAPTURE(far);
    CHECK_FALSE(IsLocal(far));
  }
}

TEST_CASE("a token goes to another machine over TLS alone") {
  ClientOptions options;
  options.token = "secret";
  CHECK(FailureOf([&] { Client("server.example:50051", options); }).reason == "TOKEN_NEEDS_TLS");
  CHECK_NOTHROW(Client("localhost:50051", options));
  CHECK_NOTHROW(Client("unix:/run/a.sock", options));
  options.insecure = true;
  CHECK_NOTHROW(Client("server.example:50051", options));
  CHECK(CheckedToken(" secret\n") == "secret");
  for (const char* bad : {"", "two words", "\x80"}) CHECK_THROWS_AS(CheckedToken(bad), Error);
}

TEST_CASE("files of TLS that cannot be used are refused by field") {
  ClientOptions options;
  options.ca = "no-such-file.pem";
  CHECK(FailureOf([&] { Client("localhost:1", options); }).violations.at(0).field == "ca");
  options = {};
  options.cert = "cert.pem";
  CHECK(FailureOf([&] { Client("localhost:1", options); }).violations.at(0).field == "key");
}

TEST_CASE("names that there are not are refused by field") {
  ImageRequest request;
  request.output_format = "GIFF";
  request.guidance_norm = "UNSPECIFIED";
  const Failure failure = FailureOf([&] { ToProto(request); });
  REQUIRE(failure.violations.size() == 2);
  CHECK(std::any_of(failure.violations.begin(), failure.violations.end(), [](const FieldViolation& one) {
    return one.field == "output_format" && one.description.find("GIFF") != std::string::npos &&
           one.description.find("RAW_RGB8") != std::string::npos;
  }));
  request.guidance_norm.reset();
  request.output_format = "raw_rgb8";
  CHECK(ToProto(request).output_format() == v1::IMAGE_FORMAT_RAW_RGB8);
  request.output_format = "";
  CHECK_THROWS_AS(ToProto(request), Error);
}

TEST_CASE("what is not set is not sent") {
  ImageRequest request;
  const v1::GenerateImageRequest bare = ToProto(request);
  CHECK_FALSE(bare.has_width());
  CHECK_FALSE(bare.has_negative_prompt());
  CHECK_FALSE(bare.sampling().has_seed());
  CHECK_FALSE(bare.sampling().has_guidance());
  CHECK_FALSE(bare.options().has_preview());
  request.seed = 0;
  request.negative_prompt = "";
  request.run_timeout = std::chrono::milliseconds(1500);
  request.preview_every_steps = 2;
  const v1::GenerateImageRequest full = ToProto(request);
  CHECK(full.sampling().has_seed());
  CHECK(full.has_negative_prompt());
  CHECK(full.options().run_timeout().seconds() == 1);
  CHECK(full.options().run_timeout().nanos() == 500'000'000);
  CHECK(full.options().preview().every_steps() == 2);
  CHECK(bare.options().request_id() != full.options().request_id());
}

TEST_CASE("digests and identifiers") {
  CHECK(Hex(Sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");  // pragma: allowlist secret
  std::set<std::string> ids;
  for (int i = 0; i < 100; ++i) {
    const std::string id = Uuid4();
    ids.insert(id);
    REQUIRE(id.size() == 36);
    CHECK(id[14] == '4');
    CHECK(std::string("89ab").find(id[19]) != std::string::npos);
  }
  CHECK(ids.size() == 100);
}

TEST_CASE("several outputs are saved beside each other, and nothing else is left") {
  const auto folder = std::filesystem::temp_directory_path() / ("omni-" + Uuid4());
  std::filesystem::create_directory(folder);
  omni::Result result;
  result.outputs = {{{}, "one"}, {{}, "two"}};
  result.Save((folder / "out.png").string());
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename().string());
  CHECK(names == std::set<std::string>{"out-0.png", "out-1.png"});
  CHECK(FailureOf([&] { result.Save((folder / "none" / "out.png").string()); }).reason == "SAVE_FAILED");
  std::filesystem::remove_all(folder);
}

namespace {

// A call that is refused, and must be read once alone.
class RefusedSource : public EventSource {
 public:
  explicit RefusedSource(int& reads) : reads_(reads) {}
  bool Read(v1::JobEvent&) override {
    ++reads_;
    return false;
  }
  grpc::Status Finish() override { return {grpc::StatusCode::NOT_FOUND, "no such model"}; }

 private:
  int& reads_;
};

}  // namespace

TEST_CASE("a stream that ended with an error ends with it again") {
  int reads = 0;
  const auto connection = std::make_shared<Connection>("localhost:1", ClientOptions{});
  const auto open = [&reads](const Deadline&) { return std::make_unique<RefusedSource>(reads); };
  StreamImpl stream(connection, open, WatchState({}, v1::ARTIFACT_DELIVERY_REFERENCE), Deadline(std::nullopt), true);
  for (int time = 0; time < 2; ++time) {
    CHECK(FailureOf([&stream] { stream.Next(); }).code == Code::NotFound);
  }
  CHECK(reads == 1);
}
