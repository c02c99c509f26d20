/**
 * A model in training, by the C functions of relax_grad_trainer.h.
 *
 * <p>It is used by the thread that opened it: TVM's runtime has a pool of threads for each thread
 * that calls it. A failure of the library is a {@link TrainerException} with its reason.
 */
public final class Trainer implements AutoCloseable {
  static {
    System.loadLibrary("java_trainer");
  }

  /** The reason of a failure. */
  public static final class TrainerException extends RuntimeException {
    private static final long serialVersionUID = 1;

    TrainerException(String reason) {
      super(reason);
    }
  }

  /** The tensors of a file of safetensors. */
  public static final class TensorFile implements AutoCloseable {
    private long handle;

    /** Reads a file. */
    public TensorFile(String path) {
      handle = readFile(path);
    }

    /** Returns the number of rows of a tensor: its first extent. */
    public long rows(String name) {
      return numRows(handle, name);
    }

    @Override
    public void close() {
      closeFile(handle);
      handle = 0;
    }
  }

  private long handle;

  /** Loads a folder that TrainStep.export wrote. */
  public Trainer(String folder) {
    handle = open(folder);
  }

  /** Returns the names of the inputs and targets of a step. */
  public String[] inputs() {
    return batchNames(handle);
  }

  /** Sets a hyperparameter of all further steps. */
  public void set(String name, double value) {
    setHyperparameter(handle, name, value);
  }

  /** Runs a step on rows of the tensors that have the names of the inputs, and returns the loss. */
  public double step(TensorFile file, long first, long rows) {
    return step(handle, file.handle, first, rows);
  }

  /** Counts a complete epoch. */
  public void endEpoch() {
    endEpoch(handle);
  }

  /** Writes everything that training needs to go on. */
  public void save(String path) {
    save(handle, path);
  }

  @Override
  public void close() {
    close(handle);
    handle = 0;
  }

  private static native long open(String folder);

  private static native void close(long trainer);

  private static native String[] batchNames(long trainer);

  private static native void setHyperparameter(long trainer, String name, double value);

  private static native double step(long trainer, long file, long first, long rows);

  private static native void endEpoch(long trainer);

  private static native void save(long trainer, String path);

  private static native long readFile(String path);

  private static native void closeFile(long file);

  private static native long numRows(long file, String name);
}
