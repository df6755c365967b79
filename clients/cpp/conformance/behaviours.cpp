#include "behaviours.hpp"

#include <omni_grpc/client.hpp>

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>

#include "digest.hpp"

namespace {

using nlohmann::json;
using omni::internal::Hex;
using omni::internal::Sha256;
namespace v1 = omni::v1;

std::string Text(const json& asked, const char* name) { return asked.value(name, std::string()); }

omni::Client Connect(const json& asked) {
  omni::ClientOptions options;
  options.ca = Text(asked, "ca");
  options.token = Text(asked, "token");
  return omni::Client(asked.at("address").get<std::string>(), options);
}

template <class Request>
Request Make(const json& asked) {
  Request request;
  request.prompt = asked.at("prompt").get<std::string>();
  request.model = asked.at("model").get<std::string>();
  if (asked.contains("width")) request.width = asked["width"].get<std::uint32_t>();
  if (asked.contains("height")) request.height = asked["height"].get<std::uint32_t>();
  if (asked.contains("steps")) request.steps = asked["steps"].get<std::uint32_t>();
  if (asked.contains("seed")) request.seed = asked["seed"].get<std::uint64_t>();
  return request;
}

omni::ImageRequest Image(const json& asked) { return Make<omni::ImageRequest>(asked); }

json Outputs(const omni::Result& result) {
  json found = json::array();
  for (const omni::Output& output : result.outputs) {
    found.push_back({{"mime_type", output.artifact.mime_type()},
                     {"sha256", Hex(Sha256(output.data))},
                     {"seed", output.artifact.seed()}});
  }
  return found;
}

json ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const omni::Error& error) {
    json fields = json::object();
    for (const auto& one : error.violations()) fields[one.field] = one.description;
    const auto after = error.retry_after();
    return {{"code", omni::CodeName(error.code())},
            {"reason", error.reason()},
            {"fields", fields},
            {"retry_after", after ? json(after->count()) : json(nullptr)},
            {"job_id", error.job_id()}};
  }
  throw std::runtime_error("the call did not fail");
}

json Models(omni::Client& client) {
  json names = json::array();
  for (const v1::Model& model : client.ListModels()) names.push_back(model.name());
  return names;
}

json Events(omni::Stream stream) {
  json seqs = json::array();
  json kinds = json::array();
  for (const v1::JobEvent& event : stream) {
    seqs.push_back(event.seq());
    kinds.push_back(omni::EventKind(event));
  }
  return {{"seqs", seqs}, {"kinds", kinds}, {"outputs", Outputs(stream.Result())}};
}

json Generate(const json& asked) {
  const omni::Result result = Connect(asked).GenerateImage(Image(asked));
  return {{"job_id", result.job_id},
          {"outputs", Outputs(result)},
          {"steps", result.effective.steps()},
          {"width", result.effective.width()},
          {"warnings", result.warnings.size()}};
}

json Progress(const json& asked) {
  json kinds = json::array();
  json steps = json::array();
  omni::Progress progress;
  progress.on_event = [&](const v1::JobEvent& event) { kinds.push_back(omni::EventKind(event)); };
  progress.on_step = [&](const v1::StepProgress& step) { steps.push_back({step.step(), step.total_steps()}); };
  Connect(asked).GenerateImage(Image(asked), progress);
  return {{"kinds", kinds}, {"steps", steps}};
}

json Previews(const json& asked) {
  json previews = json::array();
  omni::ImageRequest request = Image(asked);
  request.preview_every_steps = 1;
  omni::Progress progress;
  progress.on_preview = [&](const v1::StepProgress& step, const v1::Preview& preview) {
    previews.push_back({{"step", step.step()},
                        {"mime_type", preview.mime_type()},
                        {"sha256", Hex(Sha256(preview.data()))}});
  };
  Connect(asked).GenerateImage(request, progress);
  return {{"previews", previews}};
}

json Unset(const json& asked) {
  omni::Client client = Connect(asked);
  omni::ImageRequest request = Image(asked);
  const omni::Result free = client.GenerateImage(request);
  request.seed = 0;
  const omni::Result first = client.GenerateImage(request);
  const omni::Result second = client.GenerateImage(request);
  return {{"seeds", {free.effective.seeds(0), first.effective.seeds(0), second.effective.seeds(0)}},
          {"same", first.outputs.at(0).data == second.outputs.at(0).data}};
}

json Edit(const json& asked) {
  omni::Client client = Connect(asked);
  const std::string id = client.Upload(omni::Media::File(asked.at("image").get<std::string>())).asset_id();
  auto request = Make<omni::EditRequest>(asked);
  request.images = {omni::Media::Asset(id)};
  return {{"asset_id", id}, {"outputs", Outputs(client.EditImage(request))}};
}

json Upload(const json& asked) {
  const auto stored = Connect(asked).Upload(omni::Media::File(asked.at("file").get<std::string>()));
  return {{"asset_id", stored.asset_id()}, {"size_bytes", stored.size_bytes()}, {"sha256", Hex(stored.sha256())}};
}

json Download(const json& asked) {
  const omni::Downloaded found = Connect(asked).Download(asked.at("artifact_id").get<std::string>());
  return {{"sha256", Hex(Sha256(found.data))}, {"size_bytes", found.data.size()}};
}

json Corrupt(const json& asked) {
  omni::Client client = Connect(asked);
  return {{"error", ErrorOf([&] { client.Download(asked.at("artifact_id").get<std::string>()); })}};
}

json Resume(const json& asked) { return Events(Connect(asked).StreamImage(Image(asked))); }

json Watch(const json& asked) {
  return Events(Connect(asked).WatchJob(asked.at("job_id").get<std::string>(), asked.at("after_seq").get<std::uint64_t>()));
}

json Cancel(const json& asked) {
  omni::Client client = Connect(asked);
  omni::Stream stream = client.StreamImage(Image(asked));
  for (const v1::JobEvent& event : stream) {
    if (event.has_step_progress()) break;
  }
  return {{"job_id", stream.job_id()}};  // leaving the scope cancels the job
}

json Failing(const json& asked) {
  omni::Client client = Connect(asked);
  omni::ImageRequest request = Image(asked);
  if (asked.contains("run_timeout")) request.run_timeout = omni::Seconds(asked["run_timeout"].get<double>());
  if (asked.contains("timeout")) request.timeout = omni::Seconds(asked["timeout"].get<double>());
  return {{"error", ErrorOf([&] {
             // here, so that the names of a request are checked as well
             if (asked.contains("output_format")) request.output_format = asked["output_format"].get<std::string>();
             client.GenerateImage(request);
           })}};
}

json Idempotent(const json& asked) {
  omni::Client client = Connect(asked);
  omni::ImageRequest request = Image(asked);
  request.request_id = asked.at("request_id").get<std::string>();
  const std::string first = client.CreateJob(request).job_id();
  const std::string second = client.CreateJob(request).job_id();
  request.prompt = asked.at("other_prompt").get<std::string>();
  return {{"job_ids", {first, second}}, {"error", ErrorOf([&] { client.CreateJob(request); })}};
}

json RetryModels(const json& asked) {
  omni::Client client = Connect(asked);
  return {{"models", Models(client)}};
}

json RetryInfo(const json& asked) { return {{"job_id", Connect(asked).CreateJob(Image(asked)).job_id()}}; }

json Token(const json& asked) {
  omni::ClientOptions options;
  options.ca = Text(asked, "ca");
  const auto tokens = asked.at("tokens").get<std::vector<std::string>>();
  options.token_source = [tokens, next = std::size_t{0}]() mutable { return tokens.at(next++); };
  omni::Client client(asked.at("address").get<std::string>(), options);
  const json error = ErrorOf([&] { client.ListModels(); });
  return {{"error", error}, {"models", Models(client)}};
}

json Tls(const json& asked) {
  omni::Client client = Connect(asked);
  json other = asked;
  other["ca"] = asked.at("other_ca");
  omni::Client stranger = Connect(other);
  const json error = ErrorOf([&] { stranger.ListModels(); });
  const json refused = ErrorOf([&] {
    omni::ClientOptions options;
    options.token = Text(asked, "token");
    omni::Client far("server.example:50051", options);
  });
  return {{"models", Models(client)}, {"error", error}, {"refused", refused}};
}

}  // namespace

json Show(const json& asked) {
  const std::map<std::string, std::function<json(const json&)>> behaviours = {
      {"generate", Generate}, {"progress", Progress},     {"previews", Previews}, {"unset", Unset},
      {"edit", Edit},         {"upload", Upload},         {"download", Download}, {"corrupt", Corrupt},
      {"resume", Resume},     {"watch", Watch},           {"cancel", Cancel},     {"cancelled", Failing},
      {"failure", Failing},   {"fields", Failing},        {"names", Failing},     {"idempotent", Idempotent},
      {"deadline", Failing},  {"retry", RetryModels},     {"retry_info", RetryInfo},
      {"token", Token},       {"tls", Tls},
  };
  const auto name = asked.at("behaviour").get<std::string>();
  const auto found = behaviours.find(name);
  if (found == behaviours.end()) throw std::invalid_argument("no behaviour " + name);
  return found->second(asked);
}
