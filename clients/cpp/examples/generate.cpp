// Makes an image and saves it: generate ADDRESS PROMPT FILE
#include <omni_grpc/client.hpp>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: generate ADDRESS PROMPT FILE\n";
    return 2;
  }
  try {
    omni::Client client(argv[1]);
    omni::ImageRequest request;
    request.prompt = argv[2];
    request.steps = 20;
    omni::Progress progress;
    progress.on_step = [](const omni::v1::StepProgress& step) {
      std::cerr << "step " << step.step() << " of " << step.total_steps() << '\n';
    };
    const omni::Result result = client.GenerateImage(request, progress);
    result.Save(argv[3]);
    std::cout << argv[3] << ": seed " << result.outputs.at(0).artifact.seed() << '\n';
  } catch (const omni::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
