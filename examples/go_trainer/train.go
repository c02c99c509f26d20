// Trains an exported model on examples in a file, in Go, through the C functions of
// relax_grad_trainer.h.
//
//	go_trainer FOLDER DATA EPOCHS ROWS LEARNING_RATE STATE
//
// FOLDER was written by TrainStep.export. DATA is a file of safetensors with a tensor for each
// input and target of the step, whose first axis counts the examples. The last examples that fill
// no batch are left out. STATE gets the state of training.
package main

/*
#cgo LDFLAGS: -lrelax_grad_trainer_c
#include <stdlib.h>
#include "relax_grad_trainer.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"unsafe"
)

// failure returns the error of a code. The caller has locked its thread, whose error it is.
func failure(code C.int32_t) error {
	if code == C.RELAX_GRAD_OK {
		return nil
	}
	return errors.New(C.GoString(C.relax_grad_last_error()))
}

// Trainer is a model in training. It is used by the goroutine that opened it, which must be locked
// to its thread: TVM's runtime has a pool of threads, and the library an error, for each thread.
type Trainer struct{ handle *C.relax_grad_trainer }

// Open loads a folder.
func Open(folder string) (*Trainer, error) {
	path := C.CString(folder)
	defer C.free(unsafe.Pointer(path))
	trainer := &Trainer{}
	return trainer, failure(C.relax_grad_open(path, nil, &trainer.handle))
}

// Close frees the trainer.
func (t *Trainer) Close() { C.relax_grad_close(t.handle) }

// Inputs returns the names of the inputs and targets of a step.
func (t *Trainer) Inputs() ([]string, error) {
	var number C.int64_t
	if err := failure(C.relax_grad_num_batch(t.handle, &number)); err != nil {
		return nil, err
	}
	names := make([]string, number)
	for i := range names {
		var found C.relax_grad_type
		if err := failure(C.relax_grad_batch(t.handle, C.int64_t(i), &found)); err != nil {
			return nil, err
		}
		names[i] = C.GoString(found.name)
	}
	return names, nil
}

// Set sets a hyperparameter of all further steps.
func (t *Trainer) Set(name string, value float64) error {
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	return failure(C.relax_grad_set_hyperparameter(t.handle, text, C.double(value)))
}

// Tensor is a tensor in memory of C.
type Tensor struct{ values C.relax_grad_tensor }

// rows returns the number of rows.
func (t Tensor) rows() int64 {
	if t.values.num_axes == 0 {
		return 0
	}
	return int64(*t.values.shape)
}

// Step runs a step on rows of the inputs, and returns the loss. Arrays that C reads are in memory
// of C: they hold pointers, and cgo allows none from memory of Go to memory of Go.
func (t *Trainer) Step(inputs []Tensor, first, rows int64) (float64, error) {
	size := C.size_t(len(inputs)) * C.size_t(unsafe.Sizeof(C.relax_grad_tensor{}))
	batch := (*C.relax_grad_tensor)(C.malloc(size))
	defer C.free(unsafe.Pointer(batch))
	for i, each := range unsafe.Slice(batch, len(inputs)) {
		each = inputs[i].values
		row := int64(each.num_bytes) / int64(*each.shape)
		shape := (*C.int64_t)(C.malloc(C.size_t(each.num_axes) * 8))
		defer C.free(unsafe.Pointer(shape))
		copy(unsafe.Slice(shape, each.num_axes), unsafe.Slice(each.shape, each.num_axes))
		*shape = C.int64_t(rows)
		each.shape = shape
		each.data = unsafe.Add(each.data, first*row)
		each.num_bytes = C.uint64_t(rows * row)
		unsafe.Slice(batch, len(inputs))[i] = each
	}
	var result C.relax_grad_result
	err := failure(C.relax_grad_step(t.handle, batch, C.int64_t(len(inputs)), &result))
	return float64(result.loss), err
}

// EndEpoch counts a complete epoch.
func (t *Trainer) EndEpoch() error {
	var counters C.relax_grad_counters
	if err := failure(C.relax_grad_get_counters(t.handle, &counters)); err != nil {
		return err
	}
	counters.epoch++
	return failure(C.relax_grad_set_counters(t.handle, &counters))
}

// Save writes everything that training needs to go on.
func (t *Trainer) Save(path string) error {
	text := C.CString(path)
	defer C.free(unsafe.Pointer(text))
	return failure(C.relax_grad_save(t.handle, text))
}

// File has the tensors of a file of safetensors.
type File struct{ handle *C.relax_grad_file }

// Read reads a file.
func Read(path string) (*File, error) {
	text := C.CString(path)
	defer C.free(unsafe.Pointer(text))
	file := &File{}
	return file, failure(C.relax_grad_read_file(text, &file.handle))
}

// Close frees the tensors.
func (f *File) Close() { C.relax_grad_close_file(f.handle) }

// Tensor returns a tensor by its name. Its memory belongs to the file.
func (f *File) Tensor(name string) (Tensor, error) {
	var number C.int64_t
	if err := failure(C.relax_grad_num_file_tensors(f.handle, &number)); err != nil {
		return Tensor{}, err
	}
	for i := C.int64_t(0); i < number; i++ {
		var found Tensor
		if err := failure(C.relax_grad_file_tensor(f.handle, i, &found.values)); err != nil {
			return found, err
		}
		if C.GoString(found.values.name) == name {
			return found, nil
		}
	}
	return Tensor{}, fmt.Errorf("the data have no tensor %s", name)
}

func train(folder, data string, epochs, rows int64, rate float64, state string) error {
	trainer, err := Open(folder)
	if err != nil {
		return err
	}
	defer trainer.Close()
	file, err := Read(data)
	if err != nil {
		return err
	}
	defer file.Close()
	names, err := trainer.Inputs()
	if err != nil {
		return err
	}
	var inputs []Tensor
	for _, name := range names {
		tensor, err := file.Tensor(name)
		if err != nil {
			return err
		}
		inputs = append(inputs, tensor)
		if tensor.rows() < rows || tensor.rows() != inputs[0].rows() {
			return fmt.Errorf("%s has %d rows; a batch has %d, and %s %d", name, tensor.rows(), rows,
				names[0], inputs[0].rows())
		}
	}
	if err := trainer.Set("lr", rate); err != nil {
		return err
	}
	for epoch := int64(1); epoch <= epochs; epoch++ {
		total, batches := 0.0, inputs[0].rows()/rows
		for i := int64(0); i < batches; i++ {
			loss, err := trainer.Step(inputs, i*rows, rows)
			if err != nil {
				return err
			}
			total += loss
		}
		if err := trainer.EndEpoch(); err != nil {
			return err
		}
		fmt.Printf("epoch %d: mean loss %g\n", epoch, total/float64(batches))
	}
	return trainer.Save(state)
}

func main() {
	runtime.LockOSThread()
	if len(os.Args) != 7 {
		fmt.Fprintln(os.Stderr, "usage: go_trainer FOLDER DATA EPOCHS ROWS LEARNING_RATE STATE")
		os.Exit(2)
	}
	epochs, first := strconv.ParseInt(os.Args[3], 10, 64)
	rows, second := strconv.ParseInt(os.Args[4], 10, 64)
	rate, third := strconv.ParseFloat(os.Args[5], 64)
	if first != nil || second != nil || third != nil || epochs < 1 || rows < 1 {
		fmt.Fprintln(os.Stderr,
			"error: EPOCHS and ROWS must be integers from 1, and LEARNING_RATE a number")
		os.Exit(2)
	}
	if err := train(os.Args[1], os.Args[2], epochs, rows, rate, os.Args[6]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
