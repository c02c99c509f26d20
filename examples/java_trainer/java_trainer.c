/* The native methods of Trainer.java: each calls functions of relax_grad_trainer.h. A failure
 * throws a TrainerException, with which the method of Java ends. */
#include <jni.h>
#include <stdlib.h>
#include <string.h>

#include "relax_grad_trainer.h"

#define METHOD(type, name) JNIEXPORT type JNICALL Java_Trainer_##name

/* Throws the reason of a code; returns whether there is none. */
static int ok(JNIEnv* env, int32_t code) {
  if (code == RELAX_GRAD_OK) return 1;
  jclass type = (*env)->FindClass(env, "Trainer$TrainerException");
  if (type != NULL) (*env)->ThrowNew(env, type, relax_grad_last_error());
  return 0;
}

static void fail(JNIEnv* env, const char* reason) {
  jclass type = (*env)->FindClass(env, "Trainer$TrainerException");
  if (type != NULL) (*env)->ThrowNew(env, type, reason);
}

/* Finds the tensor of a file with a name; returns whether there is one. */
static int find(JNIEnv* env, relax_grad_file* file, const char* name, relax_grad_tensor* tensor) {
  int64_t number = 0;
  if (!ok(env, relax_grad_num_file_tensors(file, &number))) return 0;
  for (int64_t i = 0; i < number; ++i) {
    if (!ok(env, relax_grad_file_tensor(file, i, tensor))) return 0;
    if (strcmp(tensor->name, name) == 0) return 1;
  }
  fail(env, "the data lack an input or a target of the step");
  return 0;
}

METHOD(jlong, open)(JNIEnv* env, jclass self, jstring folder) {
  (void)self;
  const char* path = (*env)->GetStringUTFChars(env, folder, NULL);
  if (path == NULL) return 0;
  relax_grad_trainer* trainer = NULL;
  ok(env, relax_grad_open(path, NULL, &trainer));
  (*env)->ReleaseStringUTFChars(env, folder, path);
  return (jlong)(intptr_t)trainer;
}

METHOD(void, close)(JNIEnv* env, jclass self, jlong trainer) {
  (void)self;
  ok(env, relax_grad_close((relax_grad_trainer*)(intptr_t)trainer));
}

METHOD(jobjectArray, batchNames)(JNIEnv* env, jclass self, jlong handle) {
  (void)self;
  relax_grad_trainer* trainer = (relax_grad_trainer*)(intptr_t)handle;
  int64_t number = 0;
  if (!ok(env, relax_grad_num_batch(trainer, &number))) return NULL;
  jclass text = (*env)->FindClass(env, "java/lang/String");
  if (text == NULL) return NULL;
  jobjectArray names = (*env)->NewObjectArray(env, (jsize)number, text, NULL);
  for (int64_t i = 0; names != NULL && i < number; ++i) {
    relax_grad_type type;
    if (!ok(env, relax_grad_batch(trainer, i, &type))) return NULL;
    jstring name = (*env)->NewStringUTF(env, type.name);
    if (name == NULL) return NULL;
    (*env)->SetObjectArrayElement(env, names, (jsize)i, name);
    if ((*env)->ExceptionCheck(env)) return NULL;
    (*env)->DeleteLocalRef(env, name);
  }
  return names;
}

METHOD(void, setHyperparameter)(JNIEnv* env, jclass self, jlong trainer, jstring name,
                                jdouble value) {
  (void)self;
  const char* text = (*env)->GetStringUTFChars(env, name, NULL);
  if (text == NULL) return;
  ok(env, relax_grad_set_hyperparameter((relax_grad_trainer*)(intptr_t)trainer, text, value));
  (*env)->ReleaseStringUTFChars(env, name, text);
}

/* Fills the rows of a batch from a file; returns whether that succeeded. */
static int fill(JNIEnv* env, relax_grad_trainer* trainer, relax_grad_file* file, int64_t number,
                int64_t first, int64_t rows, relax_grad_tensor* batch, int64_t** shapes) {
  for (int64_t i = 0; i < number; ++i) {
    relax_grad_type type;
    relax_grad_tensor tensor;
    if (!ok(env, relax_grad_batch(trainer, i, &type))) return 0;
    if (!find(env, file, type.name, &tensor)) return 0;
    if (tensor.num_axes < 1 || first < 0 || rows < 1 || first > tensor.shape[0] - rows) {
      fail(env, "the data have no such rows");
      return 0;
    }
    int64_t row = (int64_t)tensor.num_bytes / tensor.shape[0];
    shapes[i] = malloc((size_t)tensor.num_axes * sizeof **shapes);
    if (shapes[i] == NULL) {
      fail(env, "there is no memory");
      return 0;
    }
    memcpy(shapes[i], tensor.shape, (size_t)tensor.num_axes * sizeof **shapes);
    shapes[i][0] = rows;
    batch[i] = tensor;
    batch[i].shape = shapes[i];
    batch[i].data = (char*)tensor.data + first * row;
    batch[i].num_bytes = (uint64_t)(rows * row);
  }
  return 1;
}

METHOD(jdouble, step)(JNIEnv* env, jclass self, jlong handle, jlong file, jlong first, jlong rows) {
  (void)self;
  relax_grad_trainer* trainer = (relax_grad_trainer*)(intptr_t)handle;
  int64_t number = 0;
  if (!ok(env, relax_grad_num_batch(trainer, &number))) return 0;
  relax_grad_tensor* batch = calloc((size_t)number, sizeof *batch);
  int64_t** shapes = calloc((size_t)number, sizeof *shapes);
  relax_grad_result result = {0, 0};
  if (batch == NULL || shapes == NULL) {
    fail(env, "there is no memory");
  } else if (fill(env, trainer, (relax_grad_file*)(intptr_t)file, number, first, rows, batch,
                  shapes)) {
    ok(env, relax_grad_step(trainer, batch, number, &result));
  }
  for (int64_t i = 0; shapes != NULL && i < number; ++i) free(shapes[i]);
  free(shapes);
  free(batch);
  return result.loss;
}

METHOD(void, endEpoch)(JNIEnv* env, jclass self, jlong handle) {
  (void)self;
  relax_grad_trainer* trainer = (relax_grad_trainer*)(intptr_t)handle;
  relax_grad_counters counters;
  if (!ok(env, relax_grad_get_counters(trainer, &counters))) return;
  counters.epoch += 1;
  ok(env, relax_grad_set_counters(trainer, &counters));
}

METHOD(void, save)(JNIEnv* env, jclass self, jlong trainer, jstring path) {
  (void)self;
  const char* text = (*env)->GetStringUTFChars(env, path, NULL);
  if (text == NULL) return;
  ok(env, relax_grad_save((relax_grad_trainer*)(intptr_t)trainer, text));
  (*env)->ReleaseStringUTFChars(env, path, text);
}

METHOD(jlong, readFile)(JNIEnv* env, jclass self, jstring path) {
  (void)self;
  const char* text = (*env)->GetStringUTFChars(env, path, NULL);
  if (text == NULL) return 0;
  relax_grad_file* file = NULL;
  ok(env, relax_grad_read_file(text, &file));
  (*env)->ReleaseStringUTFChars(env, path, text);
  return (jlong)(intptr_t)file;
}

METHOD(void, closeFile)(JNIEnv* env, jclass self, jlong file) {
  (void)self;
  ok(env, relax_grad_close_file((relax_grad_file*)(intptr_t)file));
}

METHOD(jlong, numRows)(JNIEnv* env, jclass self, jlong file, jstring name) {
  (void)self;
  const char* text = (*env)->GetStringUTFChars(env, name, NULL);
  if (text == NULL) return 0;
  relax_grad_tensor tensor;
  int64_t rows = 0;
  if (find(env, (relax_grad_file*)(intptr_t)file, text, &tensor) && tensor.num_axes > 0) {
    rows = tensor.shape[0];
  }
  (*env)->ReleaseStringUTFChars(env, name, text);
  return rows;
}
