/** Training in a page, a worker or Node, with a step that relax_grad exported. */

export type DType =
  | "float64" | "float32" | "float16" | "bfloat16"
  | "int64" | "int32" | "int16" | "int8"
  | "uint64" | "uint32" | "uint16" | "uint8" | "bool";

/** Values row by row. float16 and bfloat16 are the bits in a Uint16Array. */
export type Values =
  | Float64Array | Float32Array | Int32Array | Int16Array | Int8Array
  | Uint32Array | Uint16Array | Uint8Array | BigInt64Array | BigUint64Array;

/** An input: an array of the dtype, a list of numbers, or one of both with its shape. */
export type Input =
  | Values
  | readonly (number | bigint | boolean)[]
  | {
      readonly data: Values | readonly (number | bigint | boolean)[];
      readonly shape?: readonly number[];
    };

export type Inputs = Readonly<Record<string, Input>>;

/** The dtype and the extents of an input. */
export interface Type {
  dtype: DType;
  shape: number[];
}

/** A copy of a tensor. */
export interface Tensor extends Type {
  name: string;
  data: Values;
}

/** The bytes of the files of an exported folder. */
export interface Files {
  manifest: string | ArrayBuffer | ArrayBufferView;
  module: ArrayBuffer | ArrayBufferView;
  state: ArrayBuffer | ArrayBufferView;
}

export interface Options {
  /** Whether a step whose loss or gradient is not finite is skipped; otherwise it is an error. */
  skipNonfinite?: boolean;
  /** Whether an index or a class out of range is an error before the step; true by default. */
  checkInputs?: boolean;
  /** Whether a state whose history does not fit the room is loaded without it. */
  dropHistory?: boolean;
  /** The bytes for the history and properties of states that are loaded later; 65536 by default. */
  room?: number;
}

/** The numbers of batches, updates, skipped steps, complete epochs, and batches in this epoch. */
export interface Counters {
  seed: number;
  steps: number;
  updates: number;
  skipped: number;
  epoch: number;
  batch: number;
}

export interface StepResult {
  /** The loss, from before the update. */
  loss: number;
  /** Whether the step changed the parameters. */
  applied: boolean;
  metrics: Record<string, number>;
  /** The model's outputs, if the step was made with outputs=True. */
  outputs: Tensor[];
}

/** The detail of a "progress" event. */
export interface Progress extends Counters, StepResult {
  epochs: number;
  milliseconds: number;
}

export interface FitOptions {
  /** The number of all epochs, also earlier ones; by default one more. */
  epochs?: number;
  /** Ends training after a step. */
  signal?: AbortSignal;
  /** The milliseconds after which the page may draw; 12 by default. */
  pauseMs?: number;
}

export type Batches = Iterable<Inputs> | AsyncIterable<Inputs>;

export type Group = "params" | "frozen" | "states" | "optimizer_state";

export type ErrorCode = "error" | "not_finite" | "busy" | "memory" | "broken";

/** An error of a call that does not fit, of a file, or of a step; everything is as before. */
export class TrainerError extends Error {
  constructor(message: string, code?: ErrorCode, options?: { cause?: unknown });
  readonly code: ErrorCode;
}

/** A trainer with its state. */
export class Trainer extends EventTarget {
  private constructor();

  /** The description of the step that the export wrote. */
  readonly manifest: Record<string, unknown>;
  /** The inputs of a step by their names, for each size that was exported. */
  readonly batch: Record<string, Type>[];
  /** The inputs of a prediction by their names, for each size; empty without a prediction. */
  readonly inputs: Record<string, Type>[];
  readonly hyperparameters: Record<string, number>;
  readonly counters: Counters;

  /** Sets a hyperparameter of all further steps, such as "lr". */
  setHyperparameter(name: string, value: number): void;
  setCounters(counters: Partial<Counters>): void;
  /** Returns copies of the tensors of a group by their names. */
  group(name: Group): Record<string, Tensor>;

  /** Runs a step on a batch: whole, or not at all and with an error. */
  step(batch: Inputs): StepResult;
  /** Returns the model's outputs, with the parameters or their moving averages. */
  predict(inputs: Inputs, options?: { ema?: boolean }): Tensor[];
  /**
   * Trains on the batches of epochs; a function gets the number of complete epochs. After each
   * step, a "progress" event tells its results.
   */
  fit(
    batches: Batches | ((epoch: number) => Batches | Promise<Batches>),
    options?: FitOptions,
  ): Promise<Counters>;

  /** Returns the state as the bytes of a file, which trainers of Python, C++ and C read. */
  save(): Uint8Array;
  /** Goes on from the bytes of a file that any trainer of the same step saved. */
  load(state: ArrayBuffer | ArrayBufferView): void;

  addEventListener(
    type: "progress",
    listener: (event: CustomEvent<Progress>) => void,
    options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener(
    type: string,
    listener: EventListenerOrEventListenerObject | null,
    options?: boolean | AddEventListenerOptions,
  ): void;
}

/** Opens an exported folder, by its address or path, or by the bytes of its files. */
export function open(source: string | URL | Files, options?: Options): Promise<Trainer>;
