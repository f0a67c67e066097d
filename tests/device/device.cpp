// A device in host memory that torch treats as CUDA, for tests of device placement and of the calls that a step makes on a GPU.
//
// Device memory is mapped twice. Tensors carry the address that the host cannot read; operators run on the CPU through the other
// one. Every operator goes through one fallback, which rejects mixed devices and reports the operator, the bytes it reads and
// writes, and whether a GPU would have made the host wait.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <unordered_set>

namespace {

constexpr c10::DeviceIndex DEVICES = 2;
constexpr size_t MEMORY = size_t(6) << 30;  // address space; pages become real when they are written

thread_local c10::DeviceIndex current = 0;
py::object* listener = nullptr;  // called with every call of the device; never freed, since Python may end first

// -- memory ---------------------------------------------------------------------------------------------------------------

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    std::lock_guard<std::mutex> lock(mutex_);
    map_once();
    const c10::Device device(c10::kCUDA, current);
    if (wanted == 0) return {nullptr, nullptr, [](void*) {}, device};
    const size_t size = (wanted + 511) / 512 * 512;
    size_t offset = end_;
    auto& free = free_[size];
    if (free.empty()) {
      TORCH_CHECK(end_ + size <= MEMORY, "the test device has no memory left");
      end_ += size;
    } else {
      offset = free.back();
      free.pop_back();
    }
    auto* block = new Block{this, offset, size, current};
    used[current] += size;
    peak[current] = std::max(peak[current], used[current]);
    return {hidden_ + offset, block, &Memory::release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(visible(to), visible(const_cast<void*>(from)), size); }
  char* visible(void* address) const { return open_ + (static_cast<char*>(address) - hidden_); }

  size_t used[DEVICES] = {}, peak[DEVICES] = {};

 private:
  struct Block {
    Memory* owner;
    size_t offset, size;
    c10::DeviceIndex device;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    std::lock_guard<std::mutex> lock(block->owner->mutex_);
    block->owner->free_[block->size].push_back(block->offset);
    block->owner->used[block->device] -= block->size;
    delete block;
  }
  void map_once() {
    if (hidden_) return;
    const int file = memfd_create("revisit-test-device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, MEMORY) == 0, "no memory for the test device");
    hidden_ = static_cast<char*>(mmap(nullptr, MEMORY, PROT_NONE, MAP_SHARED, file, 0));
    open_ = static_cast<char*>(mmap(nullptr, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    TORCH_CHECK(hidden_ != MAP_FAILED && open_ != MAP_FAILED, "no address space for the test device");
  }
  std::mutex mutex_;
  std::map<size_t, std::vector<size_t>> free_;
  size_t end_ = 0;
  char *hidden_ = nullptr, *open_ = nullptr;
};
Memory memory;

class OnDevice {  // allocations of this scope belong to the device
 public:
  explicit OnDevice(c10::Device device) : before_(current) {
    if (device.has_index()) current = device.index();
  }
  ~OnDevice() { current = before_; }

 private:
  c10::DeviceIndex before_;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(getDevice()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *event = this_event(); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  static void* this_event() {
    static int event;
    return &event;
  }
};

// -- tensors --------------------------------------------------------------------------------------------------------------

using Shape = at::IntArrayRef;

at::Tensor make(Shape sizes, Shape strides, at::ScalarType type, c10::Device device) {
  OnDevice scope(device);
  return at::detail::empty_strided_generic(sizes, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
}

at::Tensor host_view(const at::Tensor& tensor) {  // the same memory as a CPU tensor
  const auto& storage = tensor.storage();
  void* address = storage.mutable_data();
  if (!address) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  auto bytes = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                            c10::DataPtr(memory.visible(address), c10::Device(at::kCPU)), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

void report(const char* kind, const std::string& name, int64_t read, int64_t written) {
  if (!listener) return;
  py::gil_scoped_acquire gil;
  (*listener)(kind, name, read, written);
}

at::Tensor copy_bytes(const at::Tensor& from, const at::Tensor& to, bool async) {
  const bool source = from.is_cuda(), target = to.is_cuda();
  (target ? host_view(to) : to).copy_(source ? host_view(from) : from);
  const char* kind = source && target ? (from.device() == to.device() ? "kernel" : "between devices")
                     : async         ? "asynchronous copy"
                                     : "wait";
  report(kind, source && !target ? "copy to the host" : target && !source ? "copy from the host" : "copy_", bytes_of(from), bytes_of(to));
  return to;
}

const at::Tensor& enlarge(const at::Tensor& self, Shape sizes) {
  const size_t needed = (c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    OnDevice scope(self.device());
    auto larger = memory.allocate(needed);
    if (storage->nbytes()) memory.copy_data(larger.get(), storage->mutable_data(), storage->nbytes());
    storage->set_data_ptr(std::move(larger));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

// -- every other operator ---------------------------------------------------------------------------------------------------

// Operators whose result has a size that depends on values: the host waits for it.
const std::unordered_set<std::string> SIZED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                                         "aten::unique_consecutive", "aten::equal", "aten::is_nonzero",
                                                         "aten::bincount", "aten::repeat_interleave"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& schema = op_.schema();
    const size_t count = schema.arguments().size();
    torch::jit::Stack inner;
    for (size_t i = stack_->size() - count; i < stack_->size(); i++) inner.push_back(to_host((*stack_)[i]));
    const bool indexing = schema.name().find("index") != std::string::npos;
    if (host_operand_ && device_) {
      TORCH_CHECK(indexing, "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and cpu! (",
                  schema.name(), ")");
      report("wait", schema.name() + " with an index of the host", 0, 0);
    }
    // A tensor of one number is copied to the device; a Python number in arithmetic, or what fills a tensor, is an argument of the kernel.
    if (schema.name() == "aten::fill_") host_numbers_ = 0;
    for (; device_ && host_numbers_ > 0; host_numbers_--) report("wait", schema.name() + " with a number of the host", 0, 0);
    if (!device_) device_ = c10::Device(c10::kCUDA, current);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inner);
    for (auto& [tensor, view] : seen_)
      if (tensor.sizes() != view.sizes()) {  // an out argument that the operator resized
        enlarge(tensor, view.sizes());
        if (view.numel()) host_view(tensor).copy_(view);
      }
    torch::jit::drop(*stack_, count);
    for (auto& value : inner) stack_->push_back(to_device(value));
    report("kernel", schema.name(), read_, written_);
    if (SIZED_BY_VALUES.count(schema.name()) || boolean_index_) report("wait", schema.name(), 0, 0);
  }

 private:
  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host_operand_ |= tensor.dim() > 0;
      host_numbers_ += tensor.dim() == 0 && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return tensor;
    }
    if (!device_) device_ = tensor.device();
    TORCH_CHECK(*device_ == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
                " and ", tensor.device(), "! (", op_.schema().name(), ")");
    for (auto& [known, view] : seen_)
      if (known.is_same(tensor)) return view;
    read_ += bytes_of(tensor);
    seen_.emplace_back(tensor, host_view(tensor));
    return seen_.back().second;
  }

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_host(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorVector()) {
        const bool given = tensor.has_value() && tensor->defined();
        boolean_index_ |= given && tensor->scalar_type() == at::kBool;
        list.push_back(given ? std::optional<at::Tensor>(to_host(*tensor)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice()) {
      if (!device_) device_ = value.toDevice();
      return c10::Device(at::kCPU);
    }
    return value.isGenerator() ? c10::IValue() : value;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    written_ += bytes_of(tensor);
    for (auto& [known, view] : seen_)
      if (view.is_same(tensor)) return known;
    auto result = make(tensor.sizes(), tensor.strides(), tensor.scalar_type(), *device_);
    if (tensor.numel()) host_view(result).copy_(tensor);
    return result;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
    return list;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::optional<c10::Device> device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> seen_;  // device tensor, its view for the host
  int64_t read_ = 0, written_ = 0, host_numbers_ = 0;
  bool host_operand_ = false, boolean_index_ = false;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace

// -- torch's interface to CUDA ----------------------------------------------------------------------------------------------

namespace at {
struct TestHooks : public CUDAHooksInterface {
  explicit TestHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  Device getDeviceFromPtr(void*) const override { return Device(kCUDA, 0); }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
using CUDAHooks = TestHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  using Sizes = c10::SymIntArrayRef;
  using Type = std::optional<at::ScalarType>;
  using Layout = std::optional<at::Layout>;
  using Device = std::optional<at::Device>;
  using Pinned = std::optional<bool>;
  using Format = std::optional<at::MemoryFormat>;
  library.impl("empty.memory_format", [](Sizes sizes, Type type, Layout, Device device, Pinned, Format format) -> at::Tensor {
    OnDevice scope(device.value_or(c10::Device(c10::kCUDA)));
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                     type.value_or(at::get_default_dtype_as_scalartype()), format);
  });
  library.impl("empty_strided", [](Sizes sizes, Sizes strides, Type type, Layout, Device device, Pinned) -> at::Tensor {
    return make(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), type.value_or(at::get_default_dtype_as_scalartype()),
                device.value_or(c10::Device(c10::kCUDA)));
  });
  library.impl("as_strided", [](const at::Tensor& self, Sizes sizes, Sizes strides, std::optional<c10::SymInt> offset) {
    const auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
    return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
  });
  library.impl("view", [](const at::Tensor& self, Sizes sizes) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes)); });
  library.impl("unfold", [](const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); });
  library.impl("_reshape_alias", [](const at::Tensor& self, Sizes sizes, Sizes strides) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
  });
  library.impl("resize_", [](const at::Tensor& self, Sizes sizes, Format) -> const at::Tensor& {
    return enlarge(self, C10_AS_INTARRAYREF_SLOW(sizes));
  });
  library.impl("_copy_from", [](const at::Tensor& self, const at::Tensor& to, bool async) { return copy_bytes(self, to, async); });
  library.impl("_copy_from_and_resize", [](const at::Tensor& self, const at::Tensor& to) {
    to.resize_(self.sizes());
    return copy_bytes(self, to, false);
  });
  library.impl("copy_", [](at::Tensor& self, const at::Tensor& from, bool async) -> at::Tensor& {
    copy_bytes(from.expand(self.sizes()), self, async);
    return self;
  });
  library.impl("_local_scalar_dense", [](const at::Tensor& self) {
    report("wait", "item", self.element_size(), 0);
    return at::_local_scalar_dense(host_view(self));
  });
  library.impl("set_.source_Storage_storage_offset",
               [](at::Tensor& self, at::Storage storage, c10::SymInt offset, Sizes sizes, Sizes strides) -> at::Tensor& {
                 self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
                 self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                                                  offset.guard_int(__FILE__, __LINE__));
                 return self;
               });
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(c10::kCUDA, &memory);
  module.def("listen", [](py::object function) {
    delete listener;
    listener = function.is_none() ? nullptr : new py::object(std::move(function));
  });
  module.def("current", [] { return current; });
  module.def("set_current", [](c10::DeviceIndex device) { current = device; });
  module.def("memory", [](int device) { return std::make_pair(memory.used[device], memory.peak[device]); });
}
