// Training in a page, a worker or Node: the trainer of a step that
// Trainer.export(folder, target=relax_grad.target.wasm()) wrote. It has no dependencies.
//
// The step, its checks and its files are C, compiled to step.wasm; relax_grad_static.h says what
// each function does. This file moves bytes between JavaScript and the memory of the module.

const STATE = "state.safetensors", MANIFEST = "manifest.json", MODULE = "step.wasm";
const FORMAT = "relax_grad.web", VERSION = 2;
const OK = 0, NOT_FINITE = 2;
const PAGE = 65536;

/** The arrays of dtypes. Those without an array of their own are kept as their bits. */
const ARRAYS = {
  float64: Float64Array, float32: Float32Array, float16: Uint16Array, bfloat16: Uint16Array,
  int64: BigInt64Array, int32: Int32Array, int16: Int16Array, int8: Int8Array,
  uint64: BigUint64Array, uint32: Uint32Array, uint16: Uint16Array, uint8: Uint8Array,
  bool: Uint8Array,
};
const GROUPS = ["params", "frozen", "states", "optimizer_state"];
const COUNTERS = ["seed", "steps", "updates", "skipped", "epoch", "batch"];

/** An error of a call that does not fit, of a file, or of a step; everything is as before. */
export class TrainerError extends Error {
  /** @param {string} message @param {"error" | "not_finite" | "busy" | "memory" | "broken"} code */
  constructor(message, code = "error", options = undefined) {
    super(message, options);
    this.name = "TrainerError";
    this.code = code;
  }
}

/** Opens an exported folder, by its address or path, or by the bytes of its files. */
export async function open(source, options = {}) {
  const files = await filesOf(source);
  const manifest = readManifest(files.manifest);
  checkModule(manifest, files.module);
  let compiled;
  try {
    compiled = await WebAssembly.compile(files.module);
  } catch (error) {
    throw new TrainerError(
      `${MODULE} cannot be compiled: ${error.message}; it needs an engine with SIMD128, and with ` +
      "relaxed SIMD if its target is wasm(relaxed_simd=True)",
      "error", { cause: error });
  }
  const imports = {};
  for (const { name } of WebAssembly.Module.imports(compiled)) imports[name] = mathematics(name);
  const instance = await WebAssembly.instantiate(compiled, { env: imports });
  return new Trainer(manifest, instance.exports, files.state, options);
}

// Files

async function filesOf(source) {
  if (typeof source === "string" || source instanceof URL) {
    const [manifest, module, state] = await Promise.all(
      [MANIFEST, MODULE, STATE].map((name) => fetched(source, name)));
    return { manifest, module, state };
  }
  const files = {};
  for (const name of ["manifest", "module", "state"]) {
    const value = source?.[name];
    if (name === "manifest" && typeof value === "string") {
      files[name] = new TextEncoder().encode(value);
    } else {
      files[name] = bytesOf(value, `source.${name}`);
    }
  }
  return files;
}

async function fetched(folder, name) {
  const text = String(folder), base = text.endsWith("/") ? text : `${text}/`;
  const isAddress = /^[a-z][a-z0-9+.-]+:/i.test(base);
  if (globalThis.process?.versions?.node && (!isAddress || base.startsWith("file:"))) {
    const { readFile } = await import("node:fs/promises");
    return new Uint8Array(await readFile(isAddress ? new URL(name, base) : base + name));
  }
  const address = isAddress ? new URL(name, base) : base + name;
  let response;
  try {
    response = await fetch(address);
  } catch (error) {
    throw new TrainerError(
      `${address} cannot be fetched: ${error.message}. A page from file:// cannot fetch files: ` +
      "pass their bytes as {manifest, module, state}, or serve the folder", "error",
      { cause: error });
  }
  if (!response.ok) throw new TrainerError(`${address} cannot be fetched: ${response.status}`);
  return new Uint8Array(await response.arrayBuffer());
}

function bytesOf(value, name) {
  if (value instanceof ArrayBuffer) return new Uint8Array(value);
  if (ArrayBuffer.isView(value)) {
    return new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
  }
  throw new TrainerError(
    `${name} must be bytes, an ArrayBuffer or a view of one, but it is ${shown(value)}`);
}

function shown(value) {
  if (value === null || ["undefined", "number", "boolean", "bigint"].includes(typeof value)) {
    return String(value);
  }
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value !== "object") return `a ${typeof value}`;
  return `an object of ${value.constructor?.name ?? "no class"}`;
}

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, code) => {
  for (let bit = 0; bit < 8; ++bit) code = code & 1 ? (code >>> 1) ^ 0xedb88320 : code >>> 1;
  return code;
});

function crc32(...parts) {
  let code = 0xffffffff;
  for (const bytes of parts) {
    for (let i = 0; i < bytes.length; ++i) code = CRC_TABLE[(code ^ bytes[i]) & 255] ^ (code >>> 8);
  }
  return ((code ^ 0xffffffff) >>> 0).toString(16).padStart(8, "0");
}

function readManifest(bytes) {
  const damaged = (reason) => new TrainerError(`${MANIFEST} is damaged: ${reason}`);
  let text, manifest;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    manifest = JSON.parse(text);
  } catch (error) {
    throw damaged(error.message);
  }
  if (manifest?.format !== FORMAT) {
    throw new TrainerError(
      `${MANIFEST} must have the format "${FORMAT}", but it has ${shown(manifest?.format)}: ` +
      "export the step with target=relax_grad.target.wasm()");
  }
  if (manifest.version !== VERSION) {
    throw new TrainerError(
      `${MANIFEST} has version ${shown(manifest.version)}, but version ${VERSION} is known: take ` +
      "trainer.mjs of the same folder");
  }
  // The checksum is that of the bytes with zeros instead of its digits. All before it is ASCII.
  const found = /"crc32": ?"([0-9a-f]{8})"/.exec(text);
  if (!found) throw damaged("it has no checksum");
  const begin = found.index + found[0].length - 9;
  const zeros = new Uint8Array(8).fill(48);
  if (crc32(bytes.subarray(0, begin), zeros, bytes.subarray(begin + 8)) !== found[1]) {
    throw damaged("its checksum is wrong");
  }
  return manifest;
}

function checkModule(manifest, module) {
  if (module.length !== manifest.library_bytes) {
    throw new TrainerError(
      `${MODULE} has ${module.length} bytes, but ${MANIFEST} says ${manifest.library_bytes}: ` +
      "it is truncated, or of another export");
  }
  if (crc32(module) !== manifest.library_crc32) {
    throw new TrainerError(
      `${MODULE} is damaged, or of another export: its checksum is not that in ${MANIFEST}`);
  }
}

/** Returns a function of C's library by its name; those for float32 end in f. */
function mathematics(name) {
  const own = { exp2: (x) => 2 ** x, fmod: (x, y) => x % y };
  const double = own[name] ?? Math[name];
  if (double) return double;
  const single = own[name.slice(0, -1)] ?? Math[name.slice(0, -1)];
  return (...values) => Math.fround(single(...values));
}

/** A trainer with its state. */
export class Trainer extends EventTarget {
  #module; #handle = 0; #scratch; #busy = ""; #broken = null; #types;

  /** Use open(). */
  constructor(manifest, module, state, options) {
    super();
    this.manifest = manifest;
    this.#module = module;
    const { skipNonfinite = false, checkInputs = true, dropHistory = false } = options;
    const { room = 1 << 16 } = options, model = module.relax_grad_exported.value;
    if (!Number.isSafeInteger(room) || room < 0) {
      throw new TrainerError(`room must be a number of bytes, but it is ${shown(room)}`);
    }
    const size = Number(module.relax_grad_memory_bytes(model)) + room + headerBytes(state);
    const memory = Math.ceil(module.__heap_base.value / 64) * 64;
    this.#scratch = Math.ceil((memory + size) / 64) * 64;
    const scratch = this.#reserve(state.length + 64);
    this.#bytes(scratch + 64, state.length).set(state);
    const view = this.#view();
    [skipNonfinite, checkInputs, dropHistory].forEach(
      (option, i) => view.setInt32(scratch + 4 * i, option ? 1 : 0, true));
    this.#call("open_static", model, memory, BigInt(size), scratch + 64, BigInt(state.length),
      scratch, scratch + 12);
    this.#handle = this.#view().getUint32(scratch + 12, true);
    this.#types = {
      step: this.#typesOf("num_batch", "batch"),
      predict: this.#typesOf("num_inputs", "input"),
    };
  }

  /** The inputs of a step: for each size, the names, dtypes and shapes. */
  get batch() {
    return structuredClone(this.#types.step);
  }

  /** The inputs of a prediction: for each size, the names, dtypes and shapes. */
  get inputs() {
    return structuredClone(this.#types.predict);
  }

  /** The hyperparameters of further steps by their names. */
  get hyperparameters() {
    const found = {};
    for (let i = 0; i < this.#number("num_hyperparameters"); ++i) {
      const at = this.#reserve(16);
      this.#call("hyperparameter_name", this.#handle, BigInt(i), at);
      const name = this.#view().getUint32(at, true);
      this.#call("get_hyperparameter", this.#handle, name, at + 8);
      found[this.#text(name)] = this.#view().getFloat64(at + 8, true);
    }
    return found;
  }

  /** Sets a hyperparameter of all further steps, such as "lr". */
  setHyperparameter(name, value) {
    this.#idle("setHyperparameter");
    if (typeof value !== "number") {
      throw new TrainerError(`${name} must be a number, but it is ${shown(value)}`);
    }
    const writer = new Writer(String(name).length * 3 + 64);
    const at = writer.text(String(name));
    this.#write(writer);
    this.#call("set_hyperparameter", this.#handle, this.#scratch + at, value);
  }

  /** The seed, and the numbers of steps, updates, skipped steps, epochs and batches. */
  get counters() {
    const at = this.#reserve(8 * COUNTERS.length), found = {};
    this.#call("get_counters", this.#handle, at);
    const view = this.#view();
    COUNTERS.forEach((name, i) => { found[name] = Number(view.getBigInt64(at + 8 * i, true)); });
    return found;
  }

  /** Sets some of the counters. */
  setCounters(counters) {
    this.#idle("setCounters");
    this.#setCounters(counters);
  }

  #setCounters(counters) {
    const all = { ...this.counters };
    for (const [name, value] of Object.entries(counters)) {
      if (!COUNTERS.includes(name) || !Number.isSafeInteger(value)) {
        throw new TrainerError(
          `counters must be integers named ${COUNTERS.join(", ")}, but ${name} is ${shown(value)}`);
      }
      all[name] = value;
    }
    const at = this.#reserve(8 * COUNTERS.length);
    COUNTERS.forEach((name, i) => this.#view().setBigInt64(at + 8 * i, BigInt(all[name]), true));
    this.#call("set_counters", this.#handle, at);
  }

  /** Returns copies of the tensors of "params", "frozen", "states" or "optimizer_state". */
  group(name) {
    if (!GROUPS.includes(name)) {
      throw new TrainerError(`the group must be ${GROUPS.join(", ")}, but it is ${shown(name)}`);
    }
    const writer = new Writer(96), text = writer.text(name);
    const number = writer.take(8), tensor = writer.take(32);
    const at = this.#write(writer), found = {};
    this.#call("num_group_tensors", this.#handle, at + text, at + number);
    const count = Number(this.#view().getBigInt64(at + number, true));
    for (let i = 0; i < count; ++i) {
      this.#call("group_tensor", this.#handle, at + text, BigInt(i), at + tensor);
      const own = this.#tensor(at + tensor);
      found[own.name] = own;
    }
    return found;
  }

  /** Runs a step on a batch, and returns its loss, metrics and outputs. */
  step(batch) {
    this.#idle("step");
    return this.#step(batch);
  }

  #step(batch) {
    const writer = this.#inputs("step", batch), result = writer.take(16);
    const at = this.#write(writer);
    this.#call("step", this.#handle, at + writer.tensors, BigInt(writer.count), at + result);
    const loss = this.#view().getFloat64(at + result, true);
    const applied = this.#view().getInt32(at + result + 8, true) === 1;
    return { loss, applied, metrics: this.#metrics(), outputs: this.#outputs() };
  }

  /** Returns the outputs of a prediction, with the parameters or their moving averages. */
  predict(inputs, { ema = false } = {}) {
    this.#usable();
    if (!this.#types.predict.length) {
      throw new TrainerError("the model has no function for prediction");
    }
    const writer = this.#inputs("predict", inputs);
    const at = this.#write(writer);
    this.#call(ema ? "predict_ema" : "predict", this.#handle, at + writer.tensors,
      BigInt(writer.count));
    return this.#outputs();
  }

  /** Trains on the batches of epochs. After each step, a "progress" event tells its results. */
  async fit(batches, { epochs = this.counters.epoch + 1, signal, pauseMs = 12 } = {}) {
    this.#idle("fit");
    const first = this.counters;
    if (!Number.isSafeInteger(epochs) || epochs <= first.epoch) {
      throw new TrainerError(
        `epochs must be an integer above ${first.epoch}, the complete epochs, but it is ` +
        shown(epochs));
    }
    this.#busy = "fit";
    try {
      while (this.counters.epoch < epochs && !signal?.aborted) {
        await this.#epoch(batches, epochs, signal, pauseMs);
      }
    } finally {
      this.#busy = "";
    }
    return this.counters;
  }

  async #epoch(batches, epochs, signal, pauseMs) {
    const { epoch, batch: done } = this.counters;
    const own = typeof batches === "function" ? await batches(epoch) : batches;
    if (own?.[Symbol.iterator] === undefined && own?.[Symbol.asyncIterator] === undefined) {
      throw new TrainerError(
        "batches must be an iterable of batches, or a function of the epoch that returns one, " +
        `but it is ${shown(own)}`);
    }
    let seen = 0, resumed = performance.now();
    for await (const batch of own) {
      seen += 1;
      if (seen <= done) continue; // before the state was saved
      if (signal?.aborted) return;
      const begin = performance.now(), result = this.#step(batch);
      this.#setCounters({ batch: seen });
      const milliseconds = performance.now() - begin;
      const detail = { ...this.counters, epochs, ...result, milliseconds };
      this.dispatchEvent(new CustomEvent("progress", { detail }));
      // The page draws and takes input between steps.
      if (performance.now() - resumed >= pauseMs) {
        await new Promise((done) => { setTimeout(done); });
        resumed = performance.now();
      }
    }
    if (!seen) throw new TrainerError("batches gave no batch");
    if (seen < done) {
      throw new TrainerError(`batches gave ${seen} batches, but ${done} of the epoch are done`);
    }
    this.#setCounters({ epoch: epoch + 1, batch: 0 });
  }

  /** Returns the state as the bytes of a file, which trainers of Python, C++ and C read. */
  save() {
    this.#usable();
    const number = this.#reserve(8);
    this.#call("state_bytes", this.#handle, number);
    const size = Number(this.#view().getBigUint64(number, true));
    const at = this.#reserve(size + 8);
    this.#call("save_state", this.#handle, at + 8, BigInt(size), at);
    return this.#bytes(at + 8, size).slice();
  }

  /** Goes on from the bytes of a file that any trainer of the same step saved. */
  load(state) {
    this.#idle("load");
    const bytes = bytesOf(state, "the state"), at = this.#reserve(bytes.length + 1);
    this.#bytes(at, bytes.length).set(bytes);
    this.#call("load_state", this.#handle, at, BigInt(bytes.length));
  }

  // Calls and memory

  #usable() {
    if (this.#broken) {
      throw new TrainerError(
        `an earlier call did not end (${this.#broken.message}): open the trainer again`, "broken",
        { cause: this.#broken });
    }
  }

  #idle(name) {
    this.#usable();
    if (this.#busy) {
      throw new TrainerError(
        `${name} while ${this.#busy} runs: wait for its promise, or end it by its signal`, "busy");
    }
  }

  #call(name, ...values) {
    this.#usable();
    let code;
    try {
      code = this.#module[`relax_grad_${name}`](...values);
    } catch (error) { // a trap: the memory of the module may be half written
      this.#broken = error;
      throw new TrainerError(
        `${name} did not end: ${error.message}; open the trainer again`, "broken",
        { cause: error });
    }
    if (code !== OK) {
      const text = this.#text(this.#module.relax_grad_last_error());
      throw new TrainerError(text, code === NOT_FINITE ? "not_finite" : "error");
    }
  }

  #number(name) {
    const at = this.#reserve(8);
    this.#call(name, this.#handle, at);
    return Number(this.#view().getBigInt64(at, true));
  }

  /** Returns the address of the bytes after the trainer's memory, which grows if necessary. */
  #reserve(size) {
    const { memory } = this.#module, end = this.#scratch + size;
    const missing = Math.ceil((end - memory.buffer.byteLength) / PAGE);
    if (missing > 0) {
      try {
        memory.grow(missing);
      } catch (error) {
        throw new TrainerError(
          `the engine refuses ${Math.ceil(end / 2 ** 20)} MB of memory for the step ` +
          `(${error.message}): close other pages, or export a smaller batch`, "memory",
          { cause: error });
      }
    }
    return this.#scratch;
  }

  /** Copies what a writer has to the module, and returns its address. */
  #write(writer) {
    const at = this.#reserve(writer.size);
    writer.copyTo(this.#bytes(at, writer.size), at);
    return at;
  }

  #view() {
    return new DataView(this.#module.memory.buffer);
  }

  #bytes(at, size) {
    return new Uint8Array(this.#module.memory.buffer, at, size);
  }

  #text(at) {
    const bytes = new Uint8Array(this.#module.memory.buffer, at);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }

  #shape(at, axes) {
    const view = this.#view();
    return Array.from({ length: axes }, (_, i) => Number(view.getBigInt64(at + 8 * i, true)));
  }

  /** Returns a copy of the tensor that a structure relax_grad_tensor describes. */
  #tensor(at) {
    const view = this.#view(), axes = Number(view.getBigInt64(at + 8, true));
    const dtype = this.#text(view.getUint32(at + 4, true));
    const size = Number(view.getBigUint64(at + 24, true));
    const bytes = this.#bytes(view.getUint32(at + 20, true), size);
    return {
      name: this.#text(view.getUint32(at, true)),
      dtype,
      shape: this.#shape(view.getUint32(at + 16, true), axes),
      data: new ARRAYS[dtype](bytes.slice().buffer),
    };
  }

  #typesOf(number, name) {
    const count = this.#number(number), sizes = count ? this.#number("num_sizes") : 0, found = [];
    for (let size = 0; size < sizes; ++size) {
      found.push({});
      for (let i = 0; i < count; ++i) {
        const at = this.#reserve(24);
        this.#call(name, this.#handle, BigInt(size), BigInt(i), at);
        const view = this.#view();
        found[size][this.#text(view.getUint32(at, true))] = {
          dtype: this.#text(view.getUint32(at + 4, true)),
          shape: this.#shape(view.getUint32(at + 16, true), Number(view.getBigInt64(at + 8, true))),
        };
      }
    }
    return found;
  }

  #metrics() {
    const found = {};
    for (let i = 0; i < this.#number("num_metrics"); ++i) {
      const at = this.#reserve(16);
      this.#call("metric", this.#handle, BigInt(i), at, at + 8);
      found[this.#text(this.#view().getUint32(at, true))] = this.#view().getFloat64(at + 8, true);
    }
    return found;
  }

  #outputs() {
    return Array.from({ length: this.#number("num_outputs") }, (_, i) => {
      const at = this.#reserve(32);
      this.#call("output", this.#handle, BigInt(i), at);
      return this.#tensor(at);
    });
  }

  /** Returns a writer with the inputs of a call, as a list of structures relax_grad_tensor. */
  #inputs(kind, given) {
    const sizes = this.#types[kind], names = Object.keys(sizes[0]).join(", ");
    if (given?.constructor !== Object) {
      throw new TrainerError(`${kind} takes an object with ${names}, but it is ${shown(given)}`);
    }
    const entries = Object.entries(given).map(([name, value]) => {
      const type = sizes[0][name];
      if (!type) throw new TrainerError(`${kind} has no input ${name}; it has ${names}`);
      const isObject = value !== null && typeof value === "object" && "data" in value;
      const data = arrayOf(name, isObject ? value.data : value, type.dtype);
      return { name, data, shape: isObject ? value.shape : undefined, dtype: type.dtype };
    });
    // Arrays have no extents: they get those of the first size that all of them fit.
    const fitting = sizes.find((size) => entries.every(({ name, data, shape }) =>
      shape !== undefined || data.length === product(size[name].shape))) ?? sizes[0];
    for (const entry of entries) {
      const wanted = fitting[entry.name].shape;
      if (entry.shape === undefined && entry.data.length !== product(wanted)) {
        throw new TrainerError(
          `${entry.name} must have ${product(wanted)} elements, with the extents ` +
          `(${wanted.join(", ")}), but it has ${entry.data.length}`);
      }
      entry.shape ??= wanted;
      const isExtent = (extent) => Number.isSafeInteger(extent) && extent >= 0;
      if (!Array.isArray(entry.shape) || !entry.shape.every(isExtent)) {
        throw new TrainerError(
          `the shape of ${entry.name} must be a list of extents, but it is ${shown(entry.shape)}`);
      }
      if (product(entry.shape) !== entry.data.length) {
        throw new TrainerError(
          `${entry.name} has ${entry.data.length} elements, but the shape ` +
          `(${entry.shape.join(", ")})`);
      }
    }
    const bytes = ({ name, data, shape }) =>
      data.byteLength + 3 * name.length + 8 * shape.length + 256;
    const total = entries.reduce((sum, entry) => sum + bytes(entry), 256);
    const writer = new Writer(total);
    writer.count = entries.length;
    writer.tensors = writer.take(32 * Math.max(1, entries.length));
    entries.forEach(({ name, data, shape, dtype }, i) => {
      const at = writer.tensors + 32 * i;
      writer.address(at, writer.text(name));
      writer.address(at + 4, writer.text(dtype));
      writer.view.setBigInt64(at + 8, BigInt(shape.length), true);
      writer.address(at + 16, writer.copy(bytesOf(BigInt64Array.from(shape, BigInt), name)));
      writer.address(at + 20, writer.copy(bytesOf(data, name)));
      writer.view.setBigUint64(at + 24, BigInt(data.byteLength), true);
    });
    return writer;
  }
}

/** Structures of C with addresses relative to their begin, until they are copied. */
class Writer {
  constructor(most) {
    this.bytes = new Uint8Array(most);
    this.view = new DataView(this.bytes.buffer);
    this.size = 0;
    this.addresses = [];
  }
  take(size) {
    const at = this.size;
    this.size = Math.ceil((at + size) / 16) * 16;
    return at;
  }
  copy(bytes) {
    const at = this.take(bytes.length);
    this.bytes.set(bytes, at);
    return at;
  }
  text(text) {
    return this.copy(new TextEncoder().encode(`${text}\0`));
  }
  address(at, target) {
    this.view.setUint32(at, target, true);
    this.addresses.push(at);
  }
  copyTo(bytes, base) {
    for (const at of this.addresses) {
      this.view.setUint32(at, this.view.getUint32(at, true) + base, true);
    }
    bytes.set(this.bytes.subarray(0, this.size));
  }
}

/** Returns the bytes of the header of a state, which bound those of its history. */
function headerBytes(state) {
  if (state.length < 8) return 0;
  const view = new DataView(state.buffer, state.byteOffset);
  return Math.min(Number(view.getBigUint64(0, true)), state.length);
}

function product(extents) {
  return extents.reduce((a, b) => a * b, 1);
}

/** Returns an array of a dtype: the given one, or numbers that are converted. */
function arrayOf(name, given, dtype) {
  const Kind = ARRAYS[dtype];
  if (given instanceof Kind) return given;
  if (!Array.isArray(given)) {
    throw new TrainerError(
      `${name} must have the dtype ${dtype}, as a ${Kind.name} or a list of numbers, but it is ` +
      shown(given));
  }
  if (dtype === "float16" || dtype === "bfloat16") {
    throw new TrainerError(
      `${name} must have the dtype ${dtype}, as a Uint16Array of its bits, but it is a list`);
  }
  const isBig = Kind === BigInt64Array || Kind === BigUint64Array, made = new Kind(given.length);
  for (let i = 0; i < given.length; ++i) {
    const value = given[i];
    if (dtype.startsWith("float")) {
      if (typeof value === "number") {
        made[i] = value;
        continue;
      }
    } else if (dtype === "bool") {
      if (value === true || value === false || value === 0 || value === 1) {
        made[i] = Number(value);
        continue;
      }
    } else if (typeof value === "bigint" || Number.isSafeInteger(value)) {
      made[i] = isBig ? BigInt(value) : Number(value);
      if (BigInt(made[i]) === BigInt(value)) continue;
    }
    throw new TrainerError(
      `${name} must have elements of ${dtype}, but its element ${i} is ${shown(value)}`);
  }
  return made;
}
