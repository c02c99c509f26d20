// The trainer of a page in Node: node web_trainer.mjs COMMAND FOLDER [FILE] prints JSON. FILE has
// the batches as lists of numbers, or the bytes of a state.
import { readFileSync, writeFileSync } from "node:fs";

const [command, folder, file] = process.argv.slice(2);
const { open, TrainerError } = await import(`${folder}/trainer.mjs`);

const filesOf = () => ({
  manifest: readFileSync(`${folder}/manifest.json`),
  module: readFileSync(`${folder}/step.wasm`),
  state: readFileSync(`${folder}/state.safetensors`),
});
const batches = () => JSON.parse(readFileSync(file, "utf8"));
const same = (one, other) => Buffer.compare(one, other) === 0;

/** Returns the error of a call, and whether the state and the counters are as before. */
async function failed(trainer, call) {
  const before = trainer?.save();
  try {
    await call();
  } catch (error) {
    const isOwn = error instanceof TrainerError;
    const isSame = !before || same(before, trainer.save());
    return { message: error.message, code: isOwn ? error.code : error.constructor.name, isSame };
  }
  return { message: "no error", code: "", isSame: false };
}

const COMMANDS = {
  /** Steps, a prediction with each kind of parameters, and the state. */
  async train() {
    const trainer = await open(folder), results = batches().map((batch) => trainer.step(batch));
    const own = { counters: trainer.counters };
    own.group = Object.keys(trainer.group("optimizer_state"));
    own.losses = results.map(({ loss }) => loss);
    own.metrics = results.map(({ metrics }) => metrics);
    own.outputs = results.map(({ outputs }) => outputs.map(({ data }) => [...data]));
    const first = batches()[0], names = Object.keys(trainer.inputs[0] ?? {});
    const images = Object.fromEntries(names.map((name) => [name, first[name]]));
    if (trainer.inputs.length) {
      const hasEma = own.group.some((name) => name.startsWith("ema"));
      own.predictions = (hasEma ? [false, true] : [false]).map((ema) =>
        [...trainer.predict(images, { ema })[0].data]);
    }
    own.types = trainer.batch;
    writeFileSync(`${folder}/node.safetensors`, trainer.save());
    return own;
  },
  /** Steps, or the error of an engine that cannot compile the module. */
  async train_or_fail() {
    try {
      return await COMMANDS.train();
    } catch (error) {
      return { error: error.message };
    }
  },
  /** A state of Python goes on, by the address of the folder. */
  async resume() {
    const trainer = await open(new URL(`file://${folder}`));
    trainer.load(readFileSync(`${folder}/python.safetensors`));
    trainer.setHyperparameter("lr", 0.005);
    const losses = batches().map((batch) => trainer.step(batch).loss);
    writeFileSync(`${folder}/node.safetensors`, trainer.save());
    return { losses, hyperparameters: trainer.hyperparameters };
  },
  /** Epochs with events, an end by a signal, and the calls that wait until then. */
  async fit() {
    const trainer = await open(filesOf()), all = batches(), events = [], busy = [];
    trainer.addEventListener("progress", ({ detail }) => events.push(detail));
    const running = trainer.fit(all, { epochs: 2, pauseMs: 0 });
    for (const [name, ...values] of [["step", all[0]], ["load", new Uint8Array(8)], ["fit", all],
      ["setHyperparameter", "lr", 1], ["setCounters", { steps: 0 }]]) {
      busy.push(await failed(trainer, () => trainer[name](...values)));
    }
    const predicted = trainer.predict({ input: all[0].input }).length;
    const counters = await running, controller = new AbortController();
    const stop = () => controller.abort();
    trainer.addEventListener("progress", stop);
    async function* generator() { yield* all; }
    const stopped = await trainer.fit(() => generator(), { signal: controller.signal });
    trainer.removeEventListener("progress", stop);
    const epochs = [];
    const resumed = await trainer.fit((epoch) => { epochs.push(epoch); return all; });
    const wrong = [];
    for (const [given, options] of [[all, { epochs: 3 }], [all, { epochs: "5" }], [3], [[]]]) {
      wrong.push(await failed(trainer, () => trainer.fit(given, options)));
    }
    return { counters, stopped, resumed, epochs, busy, wrong, predicted,
      losses: events.map(({ loss }) => loss), places: events.map((e) => [e.epoch, e.batch]),
      timed: events.every((e) => e.milliseconds > 0 && e.applied) };
  },
  /** Calls that do not fit. */
  async calls() {
    const trainer = await open(folder), [good] = batches(), { input, target } = good, errors = [];
    const floats = Float32Array.from(input), classes = BigInt64Array.from(target, BigInt);
    const others = [
      {}, null, [input], { input }, { input, target, more: [1] }, { input, target: floats },
      { input: new Float64Array(input), target }, { input: "text", target },
      { input: input.slice(1), target }, { input, target: [...target, 1] },
      { input: { data: floats, shape: [floats.length] }, target },
      { input: { data: floats, shape: [1, floats.length / 64, 8, 8] }, target },
      { input: { data: floats, shape: [3] }, target },
      { input: { data: floats, shape: "6" }, target },
      { input, target: target.map(() => 10) }, { input, target: target.map(() => -1) },
      { input, target: target.map(() => 1.5) }, { input, target: target.map(() => 2n ** 64n) },
      { input: input.map(() => "1"), target }, { input: floats.map(() => NaN), target },
    ];
    for (const batch of others) errors.push(await failed(trainer, () => trainer.step(batch)));
    for (const call of [
      () => trainer.predict({ target }), () => trainer.predict({ input: [1] }),
      () => trainer.setHyperparameter("rate", 1), () => trainer.setHyperparameter("lr", NaN),
      () => trainer.setHyperparameter("lr", "1"), () => trainer.setCounters({ steps: -1 }),
      () => trainer.setCounters({ step: 1 }), () => trainer.setCounters({ steps: 1.5 }),
      () => trainer.group("weights"),
    ]) errors.push(await failed(trainer, call));
    const first = trainer.step({ target: classes, input: { data: floats } }).loss;
    const unchecked = await open(folder, { checkInputs: false, skipNonfinite: true });
    const skipped = unchecked.step({ input, target: target.map(() => 99) });
    return { errors, first, again: (await open(folder)).step(good).loss,
      skipped: [skipped.applied, unchecked.counters.skipped, String(skipped.loss)] };
  },
  /** Files that are damaged or belong to others. */
  async files() {
    const good = filesOf(), trainer = await open(good), errors = [];
    const flipped = (bytes, at) => { const own = Uint8Array.from(bytes); own[at] ^= 1; return own; };
    const text = good.manifest.toString(), foreign = Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0);
    const opened = async (changed, options) =>
      errors.push(await failed(null, () => open({ ...good, ...changed }, options)));
    await opened({ module: good.module.subarray(0, 5000) });
    await opened({ module: flipped(good.module, 5000) });
    await opened({ module: foreign });
    await opened({ module: "step.wasm" });
    await opened({ manifest: text.slice(0, -100) });
    await opened({ manifest: flipped(good.manifest, text.indexOf('"digest"') + 200) });
    await opened({ manifest: text.replace('"relax_grad.web"', '"relax_grad.training"') });
    await opened({ manifest: text.replace('"version": 2', '"version": 3') });
    await opened({ manifest: text.replace('"crc32"', '"crc33"') });
    await opened({ state: good.state.subarray(0, 7) });
    await opened({ state: flipped(good.state, good.state.length - 1) });
    await opened({ state: readFileSync(file) });
    await opened({}, { room: 2 ** 33 });
    await opened({}, { room: -1 });
    errors.push(await failed(null, () => open(3)));
    errors.push(await failed(null, () => open(`${folder}/missing`)));
    for (const state of [new Uint8Array(0), good.state.subarray(0, -1), readFileSync(file), {}]) {
      errors.push(await failed(trainer, () => trainer.load(state)));
    }
    trainer.load(good.state.buffer.slice(
      good.state.byteOffset, good.state.byteOffset + good.state.length));
    return { errors, same: same(trainer.save(), (await open(good)).save()) };
  },
  /** A step that traps, and an engine that refuses memory in the middle. */
  async traps() {
    const { instantiate } = WebAssembly, [batch] = batches();
    const withExports = (change) => {
      WebAssembly.instantiate = async (...all) => {
        const { exports } = await instantiate(...all);
        return { exports: { ...exports, ...change(exports) } };
      };
    };
    withExports(() => ({ relax_grad_step() { throw new WebAssembly.RuntimeError("unreachable"); } }));
    const trapped = await open(folder), errors = [];
    for (const call of [() => trapped.step(batch), () => trapped.step(batch), () => trapped.save()]) {
      errors.push(await failed(null, call));
    }
    let refuses = false;
    withExports(({ memory }) => ({ memory: {
      get buffer() { return memory.buffer; },
      grow(pages) { if (refuses) throw new RangeError("no memory"); return memory.grow(pages); },
    } }));
    const small = await open(folder), before = small.save();
    refuses = true;
    errors.push(await failed(null, () => small.load(new Uint8Array(1 << 24))));
    return { errors, same: same(before, small.save()), loss: small.step(batch).loss };
  },
};
console.log(JSON.stringify(await COMMANDS[command]()));
