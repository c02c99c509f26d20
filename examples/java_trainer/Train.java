/**
 * Trains an exported model on examples in a file.
 *
 * <p>{@code java Train FOLDER DATA EPOCHS ROWS LEARNING_RATE STATE}: FOLDER was written by
 * TrainStep.export. DATA is a file of safetensors with a tensor for each input and target of the
 * step, whose first axis counts the examples. The last examples that fill no batch are left out.
 * STATE gets the state of training.
 */
public final class Train {
  private Train() {}

  private static void train(
      String folder, String data, long epochs, long rows, double rate, String state) {
    try (Trainer trainer = new Trainer(folder);
        Trainer.TensorFile file = new Trainer.TensorFile(data)) {
      String[] names = trainer.inputs();
      long count = file.rows(names[0]);
      for (String name : names) {
        if (file.rows(name) < rows || file.rows(name) != count) {
          throw new IllegalArgumentException(
              String.format(
                  "%s has %d rows; a batch has %d, and %s %d",
                  name, file.rows(name), rows, names[0], count));
        }
      }
      trainer.set("lr", rate);
      for (long epoch = 1; epoch <= epochs; ++epoch) {
        double total = 0;
        long batches = count / rows;
        for (long i = 0; i < batches; ++i) {
          total += trainer.step(file, i * rows, rows);
        }
        trainer.endEpoch();
        System.out.printf("epoch %d: mean loss %g%n", epoch, total / batches);
      }
      trainer.save(state);
    }
  }

  public static void main(String[] arguments) {
    if (arguments.length != 6) {
      System.err.println("usage: java Train FOLDER DATA EPOCHS ROWS LEARNING_RATE STATE");
      System.exit(2);
    }
    long epochs = 0;
    long rows = 0;
    double rate = 0;
    try {
      epochs = Long.parseLong(arguments[2]);
      rows = Long.parseLong(arguments[3]);
      rate = Double.parseDouble(arguments[4]);
    } catch (NumberFormatException error) {
      epochs = 0; // reported below, as numbers out of range are
    }
    if (epochs < 1 || rows < 1) {
      System.err.println(
          "error: EPOCHS and ROWS must be integers from 1, and LEARNING_RATE a number");
      System.exit(2);
    }
    try {
      train(arguments[0], arguments[1], epochs, rows, rate, arguments[5]);
    } catch (Trainer.TrainerException | IllegalArgumentException error) {
      System.err.println("error: " + error.getMessage());
      System.exit(1);
    }
  }
}
