// A c10d backend that forwards every call to an inner backend which can be exchanged while the process runs.
// The ProcessGroup above it, and all that holds it (DDP, DeviceMesh, user variables), never notices.
// It holds no policy: when to exchange, abort and release is decided in swift_agent/worker/groups/process_groups.py.
//
// Works of gloo are guarded: a thread that waits for one is freed when the backend is exchanged, whether gloo notices or not.
// When a connection breaks, gloo forgets a message that is partly written or partly read, and the operation that
// waits for it returns only at the group's timeout (Pair::signalException in gloo/transport/tcp/pair.cc looks at
// neither tx_ nor rx_). With traffic under way that happens in about every tenth abort.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>  // intrusive_ptr as a holder
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>
#include <unordered_set>

#include "seeds.h"
#include "watch.h"

namespace py = pybind11;

namespace {

using c10d::Backend;
using BackendPtr = c10::intrusive_ptr<Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

using c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;

[[noreturn]] void throw_aborted(const std::string& why) {
  C10_THROW_ERROR(DistBackendError, "process group aborted: " + why);
}

// Somebody who waits for an operation of one connection.
class Waiter {
 public:
  virtual ~Waiter() = default;
  virtual void end(const std::string& why) = 0;
};

// The time between two exchanges of the backend: those who wait in it, until it ends.
class Connection {
 public:
  // False, and `why` is set, if it has ended already.
  bool add(const std::shared_ptr<Waiter>& waiter, std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) {
      why = why_;
      return false;
    }
    waiters_.insert(waiter);
    return true;
  }

  void remove(const std::shared_ptr<Waiter>& waiter) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiters_.erase(waiter);
  }

  void end(const std::string& why) {
    std::unordered_set<std::shared_ptr<Waiter>> freed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      why_ = why;
      freed.swap(waiters_);
    }
    // Without the lock: a future's callbacks run here, and may start operations.
    for (const auto& waiter : freed) waiter->end(why);
  }

 private:
  std::mutex mutex_;
  bool ended_ = false;
  std::string why_;
  std::unordered_set<std::shared_ptr<Waiter>> waiters_;
};

// The end of a collective, by its own result or by the end of the connection, whichever comes first.
class Outcome : public Waiter {
 public:
  explicit Outcome(const FuturePtr& inner)
      : future(c10::make_intrusive<Future>(inner->elementType(), inner->devices())) {}

  void end(const std::string& why) override {
    if (!claim(true, why)) return;
    try {
      throw_aborted(why);
    } catch (...) {
      future->setError(std::current_exception());
    }
  }

  void finish(Future& inner) {
    if (!claim(false, "")) return;
    if (inner.hasError()) {
      future->setError(inner.exception_ptr());
    } else {
      future->markCompleted(inner.value());
    }
  }

  // True: the operation has ended by itself. False: it was cut, see `why`.
  bool wait(std::chrono::milliseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (timeout == kNoTimeout) {
      changed_.wait(lock, [&] { return ended_; });
    } else {
      TORCH_CHECK(changed_.wait_for(lock, timeout, [&] { return ended_; }), "Operation timed out!");
    }
    return !cut_;
  }

  bool is_cut() {
    std::lock_guard<std::mutex> lock(mutex_);
    return cut_;
  }

  const std::string& why() const { return why_; }

  const FuturePtr future;

 private:
  bool claim(bool cut, const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ended_) return false;
    ended_ = true;
    cut_ = cut;
    why_ = why;
    changed_.notify_all();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false, cut_ = false;
  std::string why_;
};

// gloo's sends and receives have no future; their abort() frees the waiting thread, also if it begins to wait later.
class Interrupt : public Waiter {
 public:
  explicit Interrupt(WorkPtr inner) : inner_(std::move(inner)) {}
  void end(const std::string&) override { inner_->abort(); }

 private:
  const WorkPtr inner_;
};

class GuardedWork : public c10d::Work {
 public:
  GuardedWork(WorkPtr inner, std::shared_ptr<Connection> connection, bool has_future)
      : inner_(std::move(inner)), connection_(std::move(connection)) {
    if (!has_future) return;
    auto inner_future = inner_->getFuture();
    outcome_ = std::make_shared<Outcome>(inner_future);
    std::string why;
    if (!connection_->add(outcome_, why)) {
      outcome_->end(why);
      return;
    }
    inner_future->addCallback([outcome = outcome_, connection = connection_](Future& result) {
      connection->remove(outcome);
      outcome->finish(result);
    });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (outcome_) {
      if (!outcome_->wait(timeout)) throw_aborted(outcome_->why());
      return inner_->wait(timeout);  // returns at once: raises its error, synchronises streams
    }
    auto interrupt = std::make_shared<Interrupt>(inner_);
    std::string why;
    if (!connection_->add(interrupt, why)) throw_aborted(why);
    bool arrived = false;
    try {
      arrived = inner_->wait(timeout);
    } catch (...) {
      connection_->remove(interrupt);
      throw;
    }
    connection_->remove(interrupt);
    if (!arrived) throw_aborted("a send or receive was cut");
    return true;
  }

  FuturePtr getFuture() override { return outcome_ ? outcome_->future : inner_->getFuture(); }
  bool isCompleted() override { return (outcome_ && outcome_->is_cut()) || inner_->isCompleted(); }
  bool isSuccess() const override { return !(outcome_ && outcome_->is_cut()) && inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  const WorkPtr inner_;
  const std::shared_ptr<Connection> connection_;
  std::shared_ptr<Outcome> outcome_;
};

// The end of some all-reduces of whole inputs, of which this rank keeps its part.
class ReduceScatterWork : public c10d::Work {
 public:
  ReduceScatterWork(std::vector<WorkPtr> reductions, Tensors reduced, Tensors out, int rank, int size)
      : reductions_(std::move(reductions)), reduced_(std::move(reduced)), out_(std::move(out)), rank_(rank), size_(size) {}

  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& reduction : reductions_) reduction->wait(timeout);
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < reduced_.size(); ++i) out_[i].copy_(reduced_[i].chunk(size_)[rank_].view(out_[i].sizes()));
    reduced_.clear();
    return true;
  }
  bool isCompleted() override {
    return std::all_of(reductions_.begin(), reductions_.end(), [](const WorkPtr& one) { return one->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(reductions_.begin(), reductions_.end(), [](const WorkPtr& one) { return one->isSuccess(); });
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return out_; }

 private:
  const std::vector<WorkPtr> reductions_;
  std::mutex mutex_;
  Tensors reduced_, out_;
  const int rank_, size_;
};

// Operations of this process in which other ranks took part, but for sends and receives. Counted when they begin.
std::atomic<uint64_t> num_collectives{0};
// Its sends and receives, likewise.
std::atomic<uint64_t> num_messages{0};
// Who is in the rest of an iteration that others have passed over must not begin one: they would not come.
std::atomic<bool> refuses_collectives{false};

void begin_collective() {
  if (refuses_collectives.load()) {
    C10_THROW_ERROR(
        DistBackendError,
        "swift-agent: a collective in the rest of an iteration that others may have passed over after a failure");
  }
  num_collectives.fetch_add(1);
}

class Forward : public Backend {
 public:
  Forward(int rank, int size, std::string name) : Backend(rank, size), name_(std::move(name)) {}

  // Put `next` (may be null: every later call fails with `why`) in place and free all who wait for works of the old
  // one. That is kept in `retired_`, so that this call never waits for its threads; release() ends it. `guarded`: see
  // the top of this file.
  void exchange(BackendPtr next, const std::string& why, bool guarded) {
    if (next) {
      next->setGroupUid(getGroupUid());
      next->setGroupDesc(getGroupDesc());
    }
    auto connection = guarded ? std::make_shared<Connection>() : nullptr;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      if (inner_) retired_.push_back(std::move(inner_));
      inner_ = std::move(next);
      connection_.swap(connection);
      why_ = why;
    }
    if (connection) connection->end(why);
  }

  // Destroy the retired backends: joins their threads, so it may take tens of milliseconds. Call it without the GIL.
  void release() {
    std::vector<BackendPtr> old;
    {
      std::unique_lock<std::shared_mutex> lock(mutex_);
      old.swap(retired_);
    }
  }

  // Counted under the lock: who has cut this and reads the number then has it counted, or it is refused.
  BackendPtr inner(bool for_collective = false) const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    if (!inner_) throw_aborted(why_);
    if (for_collective && getSize() > 1) begin_collective();
    return inner_;
  }

  // Run an operation of the inner backend that is there now, and guard its work. Sends and receives have no future.
  template <typename Operation>
  WorkPtr run(Operation operation, bool is_collective = true) const {
    BackendPtr inner;
    std::shared_ptr<Connection> connection;
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      if (!inner_) throw_aborted(why_);
      inner = inner_;
      connection = connection_;
      if (is_collective && getSize() > 1) begin_collective();
    }
    if (!is_collective) num_messages.fetch_add(1);
    WorkPtr work = operation(*inner);
    if (!connection || !work) return work;
    return c10::make_intrusive<GuardedWork>(std::move(work), std::move(connection), is_collective);
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
  // A group that is stopped, or refuses, is asked too: a message may be served without it.
  bool supportsCoalescing() const override {
    auto in = inner_or_null();
    return in && in->supportsCoalescing();
  }
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

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return run([&](Backend& b) { return b.broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return run([&](Backend& b) { return b.allreduce(t, o); });
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return run([&](Backend& b) { return b.allreduce_sparse(t, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return run([&](Backend& b) { return b.allreduce_coalesced(t, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return run([&](Backend& b) { return b.reduce(t, o); });
  }
  WorkPtr allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run([&](Backend& b) { return b.allgather(out, in, o); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return run([&](Backend& b) { return b._allgather_base(out, in, o); });
  }
  WorkPtr allgather_coalesced(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run([&](Backend& b) { return b.allgather_coalesced(out, in, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run([&](Backend& b) { return b.allgather_into_tensor_coalesced(out, in, o); });
  }
  WorkPtr gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return run([&](Backend& b) { return b.gather(out, in, o); });
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  // All other `single` ones of torch are made by those here, by which they were known before.
  WorkPtr gather_single(at::Tensor& out, at::Tensor& in, const c10d::GatherOptions& o) override {
    return run([&](Backend& b) { return b.gather_single(out, in, o); });
  }
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override { inner()->addEphemeralTimeout(timeout); }
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  void startTimeEstimate() override { inner()->startTimeEstimate(); }
  float endTimeEstimate() override { return inner()->endTimeEstimate(); }
#endif
  WorkPtr scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return run([&](Backend& b) { return b.scatter(out, in, o); });
  }
  WorkPtr reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    return run([&](Backend& b) { return b.reduce_scatter(out, in, o); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    Tensors outs{out}, ins{in};
    if (is_guarded()) return reduce_and_keep_part(outs, ins, o);
    return run([&](Backend& b) { return b._reduce_scatter_base(out, in, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    if (is_guarded()) return reduce_and_keep_part(out, in, o);
    return run([&](Backend& b) { return b.reduce_scatter_tensor_coalesced(out, in, o); });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) override {
    return run([&](Backend& b) { return b.alltoall_base(out, in, out_splits, in_splits, o); });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return run([&](Backend& b) { return b.alltoall(out, in, o); });
  }
  // From now on point-to-point operations are another one's, and this one has only the rest.
  void pass_messages_to(c10::intrusive_ptr<Forward> other) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    messages_ = std::move(other);
  }

  c10::intrusive_ptr<Forward> messages() const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return messages_;
  }

  WorkPtr send(Tensors& t, int dst, int tag) override {
    if (auto other = messages()) return other->send(t, dst, tag);
    return run([&](Backend& b) { return b.send(t, dst, tag); }, false);
  }
  WorkPtr recv(Tensors& t, int src, int tag) override {
    if (auto other = messages()) return other->recv(t, src, tag);
    return run([&](Backend& b) { return b.recv(t, src, tag); }, false);
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    return run([&](Backend& b) { return b.recvAnysource(t, tag); }, false);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return run([&](Backend& b) { return b.barrier(o); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) override {
    inner(/*for_collective=*/true)->monitoredBarrier(o, wait_all);
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
  bool is_guarded() const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return connection_ != nullptr;
  }

  // gloo makes the same of all-reduces (ProcessGroupGloo::reduce_scatter_tensor_coalesced), but of its work nobody who
  // waits could be freed: that has neither a future nor an abort().
  WorkPtr reduce_and_keep_part(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) {
    TORCH_CHECK(out.size() == in.size(), "reduce_scatter: ", in.size(), " inputs for ", out.size(), " outputs");
    c10d::AllreduceOptions options;
    options.reduceOp = o.reduceOp;
    options.timeout = o.timeout;
    std::vector<WorkPtr> reductions;
    Tensors reduced;
    for (size_t i = 0; i < in.size(); ++i) {
      TORCH_CHECK(in[i].numel() == out[i].numel() * getSize() && in[i].dtype() == out[i].dtype(),
                  "reduce_scatter: an input must be as many times as long as its output as there are ranks");
      reduced.push_back(in[i].detach().flatten().clone());
      Tensors one{reduced.back()};
      reductions.push_back(allreduce(one, options));
    }
    return c10::make_intrusive<ReduceScatterWork>(std::move(reductions), std::move(reduced), out, getRank(), getSize());
  }

  const std::string name_;
  mutable std::shared_mutex mutex_;
  BackendPtr inner_;
  c10::intrusive_ptr<Forward> messages_;
  std::shared_ptr<Connection> connection_;  // null: works are not guarded
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
          [](Forward& self, const py::object& next, const std::string& why, bool guarded) {
            BackendPtr backend = next.is_none() ? BackendPtr() : next.cast<BackendPtr>();
            py::gil_scoped_release no_gil;
            self.exchange(std::move(backend), why, guarded);
          },
          py::arg("next"), py::arg("why") = "", py::arg("guarded") = false)
      .def("pass_messages_to", &Forward::pass_messages_to)
      .def("release", &Forward::release, py::call_guard<py::gil_scoped_release>());
  m.def("num_collectives", [] { return num_collectives.load(); });
  m.def("num_messages", [] { return num_messages.load(); });
  m.def("refuse_collectives", [](bool refuses) { refuses_collectives.store(refuses); });
  swift_agent::bind_seeds(m);
  swift_agent::bind_watch(m);
}
