/// The objects of C that are open.
#ifndef RELAX_GRAD_RUNTIME_HANDLES_H_
#define RELAX_GRAD_RUNTIME_HANDLES_H_

#include <mutex>
#include <set>
#include <string>

#include "error.h"

namespace relax_grad {

/// The trainers or files that are open. Threads may share it.
template <typename T>
class Handles {
 public:
  void Add(const T* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_.insert(handle);
  }
  /// Returns what a handle names; throws if it is null or closed.
  T& Get(T* handle, const char* what) {
    if (handle == nullptr) throw Error(std::string(what) + " is a null pointer");
    std::lock_guard<std::mutex> lock(mutex_);
    if (!open_.count(handle)) throw Error(std::string(what) + " is closed, or was never open");
    return *handle;
  }
  void Remove(T* handle, const char* what) {
    Get(handle, what);
    std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(handle);
  }

 private:
  std::mutex mutex_;
  std::set<const T*> open_;
};

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_HANDLES_H_
