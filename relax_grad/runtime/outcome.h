/// The outcome of a step: whether its results are kept, and which counters grow.
#ifndef RELAX_GRAD_RUNTIME_OUTCOME_H_
#define RELAX_GRAD_RUNTIME_OUTCOME_H_

#include <cstdint>

namespace relax_grad {

struct Outcome {
  /// Whether the step is an error for a caller who skips no steps. Everything then stays as it was.
  bool raises;
  /// Whether parameters, states and the optimizer's state are those that the step returned.
  bool takes_results;
  /// Whether it counts as a skipped step.
  bool is_skipped;
  /// Whether its gradient had an effect: on the parameters, or on the sums of several batches.
  bool is_applied;
};

/// Returns the outcome of a step. relax_grad/training/_outcome.py has the same table, and a test
/// compares both.
///
/// @param is_finite Whether the loss is finite.
/// @param is_applied Whether the metric "applied" is 1, as it is without this metric.
/// @param is_scaled Whether the step has dynamic loss scaling. A scale takes its new value from
/// every step.
constexpr Outcome OutcomeOf(bool is_finite, bool is_applied, bool is_scaled) {
  constexpr Outcome kDone{false, true, false, true};
  constexpr Outcome kScaleIsTooLarge{false, true, true, false};
  constexpr Outcome kIsNotFinite{true, false, true, false};
  constexpr Outcome kLossIsNotFinite{true, true, true, false};
  if (!is_finite) return is_scaled ? kLossIsNotFinite : kIsNotFinite;
  if (is_applied) return kDone;
  return is_scaled ? kScaleIsTooLarge : kIsNotFinite;
}

/// Returns whether the next step updates the parameters, and does not only add its gradient to a
/// sum. Skipped batches have no place among those of an accumulated gradient.
constexpr bool IsUpdate(int64_t steps, int64_t skipped, int64_t accumulate) {
  return (steps - skipped + 1) % accumulate == 0;
}

}  // namespace relax_grad

#endif  // RELAX_GRAD_RUNTIME_OUTCOME_H_
