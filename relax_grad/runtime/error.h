/// The exceptions of the library.
#ifndef RELAX_GRAD_RUNTIME_ERROR_H_
#define RELAX_GRAD_RUNTIME_ERROR_H_

#include <stdexcept>

namespace relax_grad {

/// A call that does not fit, a file that is damaged, or a step that failed. The trainer is as
/// before the call, unless Trainer::Step says otherwise.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A loss or a gradient that is infinite or NaN.
class NotFiniteError : public Error {
 public:
  using Error::Error;
};

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_ERROR_H_
