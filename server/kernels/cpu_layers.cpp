// The classes outrider::CompiledLayers and outrider::CompiledFrame; cpu_layers.py documents them.
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

std::unique_ptr<AOTIModelPackageLoader> load(const std::string& package) {
  return std::make_unique<AOTIModelPackageLoader>(package, "model", /*run_single_threaded=*/true);
}

class CompiledLayers : public torch::CustomClassHolder {
 public:
  CompiledLayers(const std::vector<std::string>& packages, std::vector<std::vector<Tensor>> tensors)
      : tensors_(std::move(tensors)) {
    TORCH_CHECK(packages.size() == tensors_.size(), packages.size(), " packages, but tensors of ", tensors_.size(),
                " layers");
    for (const std::string& package : packages) {
      std::unique_ptr<AOTIModelPackageLoader>& loader = loaders_[package];
      if (!loader) loader = load(package);
      layers_.push_back(loader.get());
    }
  }

  int64_t size() const { return layers_.size(); }

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

class CompiledFrame : public torch::CustomClassHolder {
 public:
  CompiledFrame(const std::string& before, const std::string& after, std::vector<Tensor> tensors,
                std::vector<int64_t> order)
      : before_(load(before)), after_(load(after)), tensors_(std::move(tensors)), order_(std::move(order)) {}

  std::vector<Tensor> before(const Tensor& token_ids, const Tensor& positions) {
    std::vector<Tensor> inputs{token_ids, positions};
    inputs.insert(inputs.end(), tensors_.begin(), tensors_.end());
    return before_->boxed_run(std::move(inputs));
  }

  Tensor after(const Tensor& hidden) {
    std::vector<Tensor> inputs{hidden};
    inputs.insert(inputs.end(), tensors_.begin(), tensors_.end());
    return after_->boxed_run(std::move(inputs)).front();
  }

  Tensor run(const c10::intrusive_ptr<CompiledLayers>& layers, const Tensor& token_ids, const Tensor& positions,
             const std::vector<Tensor>& step) {
    const std::vector<Tensor> made = before(token_ids, positions);
    std::vector<Tensor> all{positions}, shared;
    all.insert(all.end(), step.begin(), step.end());
    all.insert(all.end(), made.begin() + 1, made.end());
    for (const int64_t i : order_) shared.push_back(all.at(i));
    return after(layers->run(made.front(), shared, 0, layers->size()));
  }

 private:
  std::unique_ptr<AOTIModelPackageLoader> before_, after_;
  std::vector<Tensor> tensors_;
  std::vector<int64_t> order_;
};

TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.class_<CompiledLayers>("CompiledLayers")
      .def(torch::init<std::vector<std::string>, std::vector<std::vector<Tensor>>>())
      .def("run", &CompiledLayers::run);
  library.class_<CompiledFrame>("CompiledFrame")
      .def(torch::init<std::string, std::string, std::vector<Tensor>, std::vector<int64_t>>())
      .def("before", &CompiledFrame::before)
      .def("after", &CompiledFrame::after)
      .def("run", &CompiledFrame::run);
}

}  // namespace
}  // namespace outrider
