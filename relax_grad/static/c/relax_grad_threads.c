/* Parallel loops of kernels in several POSIX threads, if RELAX_GRAD_THREADS is their number. The
 * threads start with the first loop, wait for others, and end with the process. */
#include "relax_grad_model.h"

#if RELAX_GRAD_THREADS > 1
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begins = PTHREAD_COND_INITIALIZER, ends = PTHREAD_COND_INITIALIZER;
static pthread_cond_t passes = PTHREAD_COND_INITIALIZER;

/* The loop that runs, or the last one: its number, and the tasks that have not ended. */
static relax_grad_body* body_of_loop;
static void* data_of_loop;
static relax_grad_tasks tasks_of_loop;
static uint64_t loop;
static int32_t left, is_failed;

/* The threads that could be started, with the caller's, and whether this one runs a loop. */
static int32_t threads;
static __thread int32_t is_inside;

static void* work(void* thread) {
  int32_t task = (int32_t)(intptr_t)thread, has_part, code;
  uint64_t last = 0;
  is_inside = 1;
  for (;;) {
    pthread_mutex_lock(&lock);
    while (loop == last) pthread_cond_wait(&begins, &lock);
    last = loop;
    has_part = task < tasks_of_loop.tasks; /* A loop waits for the threads with a part. */
    pthread_mutex_unlock(&lock);
    if (!has_part) continue;
    relax_grad_use_workspace_of(task);
    code = body_of_loop(task, &tasks_of_loop, data_of_loop);
    pthread_mutex_lock(&lock);
    is_failed |= code != 0;
    if (--left == 0) pthread_cond_signal(&ends);
    pthread_mutex_unlock(&lock);
  }
  return NULL;
}

static void start(void) {
  for (threads = 1; threads < RELAX_GRAD_THREADS; ++threads) {
    pthread_t made;
    if (pthread_create(&made, NULL, work, (void*)(intptr_t)threads) != 0) break;
    pthread_detach(made);
  }
}

int relax_grad_launch(relax_grad_body* body, void* data, int tasks) {
  int code;
  if (threads == 0) start();
  if (is_inside || threads == 1 || tasks == 1) {
    relax_grad_tasks one = {NULL, 1};
    return body(0, &one, data);
  }
  pthread_mutex_lock(&lock);
  body_of_loop = body;
  data_of_loop = data;
  tasks_of_loop.tasks = tasks > 0 && tasks < threads ? tasks : threads;
  left = tasks_of_loop.tasks - 1;
  is_failed = 0;
  ++loop;
  pthread_cond_broadcast(&begins);
  pthread_mutex_unlock(&lock);
  is_inside = 1;
  code = body(0, &tasks_of_loop, data);
  is_inside = 0;
  pthread_mutex_lock(&lock);
  while (left > 0) pthread_cond_wait(&ends, &lock);
  if (is_failed && code == 0) code = -1;
  pthread_mutex_unlock(&lock);
  return code;
}

int relax_grad_barrier(int task, relax_grad_tasks* of) {
  static int32_t arrived;
  static uint64_t passed;
  (void)task;
  if (of->tasks == 1) return 0;
  pthread_mutex_lock(&lock);
  if (++arrived == of->tasks) {
    arrived = 0;
    ++passed;
    pthread_cond_broadcast(&passes);
  } else {
    uint64_t before = passed;
    while (passed == before) pthread_cond_wait(&passes, &lock);
  }
  pthread_mutex_unlock(&lock);
  return 0;
}
#endif
