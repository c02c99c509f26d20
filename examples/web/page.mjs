// The page of index.html, after shared.mjs.

const ROWS = 32, CLASSES = 10, HELD_OUT = 360, EPOCHS = 3, LESSON = 8;
const NO_STROKES = "Draw a digit first.";

const [manifest, module, state, digits] = await Promise.all(
  ["manifest", "module", "state", "digits"].map((name) => unpacked(FILES[name])));
// Each digit is 64 counts from 0 to 16, and its class.
const others = Array.from({ length: digits.length / (PIXELS + 1) }, (_, i) => {
  const own = digits.subarray(i * (PIXELS + 1), (i + 1) * (PIXELS + 1));
  const pixels = Float32Array.from(own.subarray(0, PIXELS), (count) => count / 16);
  return { pixels, label: own[PIXELS] };
});
const heldOut = others.splice(-HELD_OUT);

let mine = [];

// Data

function batchOf(samples) {
  const input = new Float32Array(ROWS * PIXELS), target = new Array(ROWS).fill(0);
  samples.forEach(({ pixels, label }, i) => {
    input.set(pixels, i * PIXELS);
    target[i] = label ?? 0;
  });
  return { input, target };
}

/** Yields the batches of an epoch: each digit of others once, and drawings in a quarter of rows. */
function* batchesOf() {
  const source = find("builtin").checked ? shuffled(others) : [];
  if (!source.length && !mine.length) throw new Error(`There is no data. ${NO_STROKES}`);
  const count = source.length ? Math.floor(source.length / ROWS) : 2 * LESSON;
  for (let i = 0; i < count; ++i) yield mixed(source.slice(i * ROWS, (i + 1) * ROWS));
}

function mixed(samples) {
  const own = samples.slice(), drawings = own.length ? ROWS / 4 : ROWS;
  for (let i = 0; mine.length && i < drawings; ++i) own[ROWS - 1 - i] = mine[random(mine.length)];
  return batchOf(own);
}

// The network

function probabilities(samples) {
  const [{ data }] = trainer.predict({ input: batchOf(samples).input });
  return probabilitiesOf(data, CLASSES, samples.length);
}

function evaluate() {
  const counts = Array.from({ length: CLASSES }, () => new Array(CLASSES).fill(0));
  let right = 0;
  for (let i = 0; i < heldOut.length; i += ROWS) {
    const samples = heldOut.slice(i, i + ROWS);
    probabilities(samples).forEach((shares, row) => {
      const guess = shares.indexOf(Math.max(...shares));
      counts[samples[row].label][guess] += 1;
      right += guess === samples[row].label;
    });
  }
  find("accuracy").textContent = `${(100 * right / heldOut.length).toFixed(1)} %`;
  showConfusion(counts, counts.map((_, digit) => digit), "Rows: the digit. Columns: the network's " +
    `answer, for ${heldOut.length} digits that it has not seen.`);
}

async function train(epochs = EPOCHS) {
  if (controller) {
    controller.abort();
    return;
  }
  await guarded(async () => {
    controller = new AbortController();
    showBusy();
    try {
      trainer.setHyperparameter("lr", Number(find("rate").value));
      trainer.setCounters({ batch: 0 }); // an epoch that was stopped begins again
      const { signal } = controller, last = trainer.counters.epoch + epochs;
      const batches = () => batchesOf();
      // Each epoch ends with the digits that the network has not seen.
      while (trainer.counters.epoch < last && !signal.aborted) {
        await trainer.fit(batches, { signal });
        evaluate();
        guess();
      }
    } finally {
      controller = null;
      showBusy();
    }
  });
}

function steps(count) {
  return guarded(async () => {
    if (controller) return; // the epoch that runs has new drawings too
    trainer.setHyperparameter("lr", Number(find("rate").value));
    for (let i = 0; i < count; ++i) {
      const rows = find("builtin").checked ? ROWS : 0;
      const source = Array.from({ length: rows }, () => others[random(others.length)]);
      if (!source.length && !mine.length) throw new Error(`There is no data. ${NO_STROKES}`);
      const begin = performance.now(), result = trainer.step(mixed(source));
      noted({ ...result, milliseconds: performance.now() - begin });
    }
    evaluate();
    guess();
  });
}

function teach(label) {
  return guarded(async () => {
    if (!strokes.length) throw new Error(NO_STROKES);
    mine.push({ pixels: pixelsOf(strokes), label });
    const noun = mine.length === 1 ? "drawing" : "drawings";
    find("mine").textContent = `${mine.length} ${noun} of yours.`;
    await steps(LESSON);
  });
}

async function restart(bytes) {
  await guarded(async () => {
    trainer.load(bytes);
    losses = [];
    times = [];
    showNumbers();
    evaluate();
    guess();
  });
}

function guess() {
  showPaper();
  const shares = strokes.length ? probabilities([{ pixels: pixelsOf(strokes) }])[0] : [];
  const best = shares.indexOf(Math.max(...shares));
  find("guess").textContent = best < 0 ? "" : `The network sees a ${best}.`;
  [...find("bars").querySelectorAll("i")].forEach((bar, digit) => {
    bar.style.setProperty("--share", shares[digit] ?? 0);
    const text = shares.length ? `${Math.round(100 * shares[digit])} %` : "";
    bar.nextElementSibling.textContent = text;
    bar.previousElementSibling.classList.toggle("best", digit === best);
  });
}

addEventListener("keydown", (event) => {
  const isOther = event.ctrlKey || event.altKey || event.metaKey;
  if (isOther || event.target.matches?.("select, input")) return;
  const key = event.key.toLowerCase();
  if (key >= "0" && key <= "9" && key.length === 1) teach(Number(key));
  else if (key === "t") train();
  else if (key === "s") steps(1);
  else if (key === "delete" || key === "backspace") clear();
});

// What the page shows

function showBusy() {
  document.documentElement.dataset.state = controller ? "training" : "ready";
  find("train").textContent = controller ? "Stop" : `Train ${EPOCHS} epochs`;
  find("train").disabled = false;
  for (const id of ["step", "save", "reset", "load"]) find(id).disabled = controller !== null;
}

for (let digit = 0; digit < CLASSES; ++digit) {
  find("bars").append(element("b", digit), element("i"), element("span"));
  const button = element("button", digit, { type: "button" });
  button.addEventListener("click", () => teach(digit));
  find("labels").append(button);
}
find("clear").addEventListener("click", clear);
find("train").addEventListener("click", () => train());
find("step").addEventListener("click", () => steps(1));
find("reset").addEventListener("click", () => restart(state));
find("save").addEventListener("click", () =>
  guarded(async () => download(trainer.save(), "state.safetensors")));
find("load").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  target.value = "";
  if (file) await restart(new Uint8Array(await file.arrayBuffer()));
});
await guarded(async () => {
  trainer = await open({ manifest, module, state });
  trainer.addEventListener("progress", ({ detail }) => noted(detail));
  showNumbers();
  evaluate();
  guess();
  showBusy();
});
// index.html#train=2 begins at once.
const wanted = /train=(\d+)/.exec(location.hash);
if (wanted && trainer) await train(Number(wanted[1]));
