/// A file descriptor that is closed with its owner.
#ifndef RELAX_GRAD_RUNTIME_HANDLE_H_
#define RELAX_GRAD_RUNTIME_HANDLE_H_

#include <unistd.h>

#include <utility>

namespace relax_grad {

class Handle {
 public:
  /// @param number The descriptor; a negative one is none.
  explicit Handle(int number) : number_(number) {}
  Handle(Handle&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Handle& operator=(Handle&&) = delete;
  ~Handle() {
    if (number_ >= 0) close(number_);
  }
  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_HANDLE_H_
