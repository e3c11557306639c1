// The class outrider::CompiledLayers; cpu_layers.py documents it.
//
// Written against torch's own C++ API, since the stable one cannot run a compiled package.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace outrider {
namespace {

using at::Tensor;
using torch::inductor::AOTIModelPackageLoader;

class CompiledLayers : public torch::CustomClassHolder {
 public:
  CompiledLayers(const std::vector<std::string>& packages, std::vector<std::vector<Tensor>> tensors)
      : tensors_(std::move(tensors)) {
    TORCH_CHECK(packages.size() == tensors_.size(), packages.size(), " packages, but tensors of ", tensors_.size(),
                " layers");
    for (const std::string& package : packages) {
      std::unique_ptr<AOTIModelPackageLoader>& loader = loaders_[package];
      if (!loader) loader = std::make_unique<AOTIModelPackageLoader>(package, "model", /*run_single_threaded=*/true);
      layers_.push_back(loader.get());
    }
  }

  Tensor run(Tensor hidden, const std::vector<Tensor>& shared, int64_t begin, int64_t end) {
    TORCH_CHECK(begin >= 0 && begin < end && end <= static_cast<int64_t>(layers_.size()), "no layers ", begin, " to ",
                end);
    for (int64_t i = begin; i < end; i++) {
      std::vector<Tensor> inputs;
      inputs.reserve(1 + shared.size() + tensors_[i].size());
      inputs.push_back(std::move(hidden));
      inputs.insert(inputs.end(), shared.begin(), shared.end());
      inputs.insert(inputs.end(), tensors_[i].begin(), tensors_[i].end());
      hidden = std::move(layers_[i]->boxed_run(std::move(inputs)).front());
    }
    return hidden;
  }

 private:
  std::unordered_map<std::string, std::unique_ptr<AOTIModelPackageLoader>> loaders_;
  std::vector<AOTIModelPackageLoader*> layers_;
  std::vector<std::vector<Tensor>> tensors_;
};

TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.class_<CompiledLayers>("CompiledLayers")
      .def(torch::init<std::vector<std::string>, std::vector<std::vector<Tensor>>>())
      .def("run", &CompiledLayers::run);
}

}  // namespace
}  // namespace outrider
