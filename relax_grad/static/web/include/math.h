/* The numbers that the tables of a step use, and pow, for WebAssembly without a library of C. */
#ifndef RELAX_GRAD_MATH_H_
#define RELAX_GRAD_MATH_H_

#define NAN __builtin_nan("")
#define INFINITY __builtin_inf()

double pow(double base, double exponent);

#endif /* RELAX_GRAD_MATH_H_ */
