// A c10d backend that forwards every call to an inner backend which can be exchanged while the process runs.
// The ProcessGroup above it, and all that holds it (DDP, DeviceMesh, user variables), never notices.
// It holds no policy: when to exchange, abort and release is decided in swift_agent/process_group.py.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>
#include <shared_mutex>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true);

namespace py = pybind11;

namespace {

using c10d::Backend;
using BackendPtr = c10::intrusive_ptr<Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

class Forward : public Backend {
 public:
  Forward(int rank, int size, std::string name) : Backend(rank, size), name_(std::move(name)) {}

  // Put `next` (may be null: every later call fails with `why`) in place. The old one is kept in `retired_`, so that
  // this call never waits for its threads; release() ends it.
  void exchange(BackendPtr next, std::string why) {
    if (next) {
      next->setGroupUid(getGroupUid());
      next->setGroupDesc(getGroupDesc());
    }
    std::unique_lock<std::shared_mutex> lock(mutex_);
    if (inner_) {
      retired_.push_back(std::move(inner_));
    }
    inner_ = std::move(next);
    why_ = std::move(why);
  }

  // Destroy the retired backends: joins their threads, so it may take tens of milliseconds. Call it without the GIL.
  void release() {
    std::vector<BackendPtr> old;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      old.swap(retired_);
    }
  }

  BackendPtr inner() const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, inner_, "process group aborted: ", why_);
    return inner_;
  }

  BackendPtr inner_or_null() const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return inner_;
  }

  const std::string getBackendName() const override { return name_; }
  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid);
    if (auto in = inner_or_null()) in->setGroupUid(uid);
  }

  // Splitting would make a communicator that nobody could make again after a failure.
  bool supportsSplitting() const override { return false; }
  bool supportsCoalescing() const override { return inner()->supportsCoalescing(); }
  bool supportsTimeEstimation() const override { return inner()->supportsTimeEstimation(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner()->setTimeout(timeout); }
  void startCoalescing() override { inner()->startCoalescing(); }
  WorkPtr endCoalescing() override { return inner()->endCoalescing(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner()->getBackendOptions(); }
  c10d::ErrorType getError() override { return inner()->getError(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return inner()->getMemAllocator(); }
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return inner()->supportsTensorAlloc(device); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inner()->allocateTensor(size, std::move(options));
  }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { return inner()->broadcast(t, o); }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override { return inner()->allreduce(t, o); }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return inner()->allreduce_sparse(t, o);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return inner()->allreduce_coalesced(t, o);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override { return inner()->reduce(t, o); }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return inner()->allgather(out, in, o);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return inner()->_allgather_base(out, in, o);
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return inner()->allgather_coalesced(out, in, o);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return inner()->allgather_into_tensor_coalesced(out, in, o);
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return inner()->gather(out, in, o);
  }
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return inner()->scatter(out, in, o);
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    return inner()->reduce_scatter(out, in, o);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return inner()->_reduce_scatter_base(out, in, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return inner()->reduce_scatter_tensor_coalesced(out, in, o);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) override {
    return inner()->alltoall_base(out, in, out_splits, in_splits, o);
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return inner()->alltoall(out, in, o);
  }
  WorkPtr send(Tensors& t, int dst, int tag) override { return inner()->send(t, dst, tag); }
  WorkPtr recv(Tensors& t, int src, int tag) override { return inner()->recv(t, src, tag); }
  WorkPtr recvAnysource(Tensors& t, int tag) override { return inner()->recvAnysource(t, tag); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return inner()->barrier(o); }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) override {
    inner()->monitoredBarrier(o, wait_all);
  }
  void setSequenceNumberForGroup() override { inner()->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner()->getSequenceNumberForGroup(); }
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    inner()->registerOnCompletionHook(std::move(hook));
  }
  void waitForPendingWorks() override { inner()->waitForPendingWorks(); }
  void enableCollectivesTiming() override { inner()->enableCollectivesTiming(); }
  void eagerConnectSingleDevice(at::Device device) override { inner()->eagerConnectSingleDevice(device); }

  // No error without an inner backend: destroy_process_group() of an aborted group must succeed.
  void abort() override {
    if (auto in = inner_or_null()) in->abort();
  }
  void shutdown() override {
    if (auto in = inner_or_null()) in->shutdown();
  }

 private:
  const std::string name_;
  mutable std::shared_mutex mutex_;
  BackendPtr inner_;
  std::vector<BackendPtr> retired_;
  std::string why_ = "not connected yet";
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Forward, c10::intrusive_ptr<Forward>, Backend>(m, "Forward")
      .def(py::init([](int rank, int size, std::string name) {
             return c10::make_intrusive<Forward>(rank, size, std::move(name));
           }),
           py::arg("rank"), py::arg("size"), py::arg("name"))
      .def(
          "exchange",
          [](Forward& self, const py::object& next, std::string why) {
            BackendPtr backend = next.is_none() ? BackendPtr() : next.cast<BackendPtr>();
            py::gil_scoped_release no_gil;
            self.exchange(std::move(backend), std::move(why));
          },
          py::arg("next"), py::arg("why") = "")
      .def("release", &Forward::release, py::call_guard<py::gil_scoped_release>());
}
