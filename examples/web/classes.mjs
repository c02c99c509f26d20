// The page of classes.html, after shared.mjs.

const ROWS = 16, CLASSES = 5, STEPS = 40, HELD_BACK = 3, MOST = 200;
const DRAWINGS = "relax_grad.drawings";

const [manifest, module, state] = await Promise.all(
  ["manifest", "module", "state"].map((name) => unpacked(FILES[name])));

let drawings = [];

// Data

/** Returns a drawing of the visitor; every third of a class is held back. */
function drawingOf(own, label, others) {
  const place = others.filter((other) => other.label === label).length;
  return { strokes: own, label, pixels: pixelsOf(own), held: place % HELD_BACK === HELD_BACK - 1 };
}

function nameOf(label) {
  return find(`name${label}`).value.trim() || `class ${label + 1}`;
}

/** Returns the classes that have drawings. */
function known() {
  const labels = Array.from({ length: CLASSES }, (_, label) => label);
  return labels.filter((label) => drawings.some((own) => own.label === label));
}

/** Returns strokes that are turned and slanted a little, as another drawing would be. */
function varied(own) {
  const angle = 0.4 * (Math.random() - 0.5), slant = 0.4 * (Math.random() - 0.5);
  const cos = Math.cos(angle), sin = Math.sin(angle);
  return own.map((stroke) => stroke.map(({ x, y }) => (
    { x: cos * (x + slant * y) - sin * y, y: sin * (x + slant * y) + cos * y })));
}

function batchOf(samples) {
  const input = new Float32Array(ROWS * PIXELS);
  samples.forEach(({ pixels }, i) => input.set(pixels, i * PIXELS));
  return { input, target: Array.from({ length: ROWS }, (_, i) => samples[i]?.label ?? 0) };
}

/** Yields the batches of an epoch: each class as often as the others. */
function* batchesOf() {
  for (let i = 0; i < STEPS; ++i) {
    const labels = known();
    yield batchOf(Array.from({ length: ROWS }, () => {
      const label = labels[random(labels.length)];
      const own = drawings.filter((drawing) => drawing.label === label && !drawing.held);
      return { label, pixels: pixelsOf(varied(own[random(own.length)].strokes)) };
    }));
  }
}

// The network

/** Returns the probabilities of the classes that have drawings; those of the others are zero. */
function probabilities(samples) {
  const labels = known(), [{ data }] = trainer.predict({ input: batchOf(samples).input });
  const logits = data.map((value, i) => (labels.includes(i % CLASSES) ? value : -Infinity));
  return probabilitiesOf(logits, CLASSES, samples.length);
}

function evaluate() {
  const counts = Array.from({ length: CLASSES }, () => new Array(CLASSES).fill(0));
  const held = drawings.filter((own) => own.held);
  let right = 0;
  for (let i = 0; i < held.length; i += ROWS) {
    const samples = held.slice(i, i + ROWS);
    probabilities(samples).forEach((shares, row) => {
      const answer = shares.indexOf(Math.max(...shares));
      counts[samples[row].label][answer] += 1;
      right += answer === samples[row].label;
    });
  }
  find("accuracy").textContent =
    held.length ? `${(100 * right / held.length).toFixed(1)} %` : "–";
  showConfusion(counts, counts.map((_, label) => nameOf(label)), "Rows: the class. Columns: the " +
    `network's answer, for ${held.length} drawings that are held back.`);
}

function guess() {
  showPaper();
  const shares = strokes.length && drawings.length
    ? probabilities([{ pixels: pixelsOf(strokes) }])[0] : [];
  const best = shares.indexOf(Math.max(...shares));
  find("guess").textContent = best < 0 ? "" : `The network sees: ${nameOf(best)}.`;
  [...find("bars").querySelectorAll("i")].forEach((bar, label) => {
    bar.style.setProperty("--share", shares[label] ?? 0);
    bar.nextElementSibling.textContent =
      shares.length ? `${Math.round(100 * shares[label])} %` : "";
    bar.previousElementSibling.textContent = nameOf(label);
    bar.previousElementSibling.classList.toggle("best", label === best);
  });
}

async function train() {
  if (controller) {
    controller.abort();
    return;
  }
  await guarded(async () => {
    if (known().length < 2) throw new Error("Add drawings of two classes first.");
    controller = new AbortController();
    showBusy();
    try {
      trainer.setHyperparameter("lr", Number(find("rate").value));
      trainer.setCounters({ batch: 0 }); // an epoch that was stopped begins again
      await trainer.fit(() => batchesOf(), { signal: controller.signal });
      evaluate();
      guess();
    } finally {
      controller = null;
      showBusy();
    }
  });
}

// What the visitor does

function add(label) {
  return guarded(async () => {
    if (!strokes.length) throw new Error("Draw something first.");
    if (drawings.length >= MOST) throw new Error(`There is room for ${MOST} drawings.`);
    drawings.push(drawingOf(strokes, label, drawings));
    clear();
    showDrawings();
  });
}

function fileOfDrawings() {
  const names = Array.from({ length: CLASSES }, (_, label) => nameOf(label));
  const kept = drawings.map(({ strokes: own, label, pixels, held }) => ({
    label, held, counts: Array.from(pixels, (value) => Math.round(16 * value)),
    strokes: own.map((stroke) => stroke.map(({ x, y }) => [x, y])) }));
  return JSON.stringify({ format: DRAWINGS, names, drawings: kept });
}

/** Returns the names and drawings of a file; an error says what does not fit. */
function readDrawings(text) {
  const check = (fits, what) => {
    if (!fits) throw new Error(`The file of drawings does not fit: ${what}.`);
  };
  let read;
  try {
    read = JSON.parse(text);
  } catch (error) {
    check(false, error.message);
  }
  check(read?.format === DRAWINGS, `its format must be "${DRAWINGS}"`);
  const { names, drawings: given } = read;
  check(Array.isArray(names) && names.length === CLASSES &&
    names.every((name) => typeof name === "string"), `names must be ${CLASSES} texts`);
  check(Array.isArray(given) && given.length <= MOST, `drawings must be a list of at most ${MOST}`);
  const isPoint = (point) => Array.isArray(point) && point.length === 2 &&
    point.every((value) => typeof value === "number" && value >= -1 && value <= 2);
  const isStroke = (stroke) => Array.isArray(stroke) && stroke.length && stroke.every(isPoint);
  const made = [];
  given.forEach((own, i) => {
    check(Number.isInteger(own?.label) && own.label >= 0 && own.label < CLASSES,
      `the label of drawing ${i} must be from 0 to ${CLASSES - 1}`);
    check(Array.isArray(own.strokes) && own.strokes.length && own.strokes.every(isStroke),
      `drawing ${i} must have strokes of points from -1 to 2`);
    const points = own.strokes.map((stroke) => stroke.map(([x, y]) => ({ x, y })));
    made.push(drawingOf(points, own.label, made));
  });
  return { names, made };
}

/** Loads files of a state and of drawings: all of them, or none. */
async function upload(files) {
  await guarded(async () => {
    const isText = (file) => file.name.endsWith(".json");
    const text = files.find(isText), bytes = files.find((file) => !isText(file));
    const read = text && readDrawings(await text.text());
    if (bytes) restart(new Uint8Array(await bytes.arrayBuffer()));
    if (read) {
      drawings = read.made;
      read.names.forEach((name, label) => { find(`name${label}`).value = name; });
    }
    showDrawings();
  });
}

function restart(bytes) {
  trainer.load(bytes);
  losses = [];
  times = [];
  showNumbers();
}

addEventListener("keydown", (event) => {
  const isOther = event.ctrlKey || event.altKey || event.metaKey;
  if (isOther || event.target.matches?.("select, input")) return;
  const key = event.key.toLowerCase(), label = "12345".indexOf(key);
  if (key.length === 1 && label >= 0) add(label);
  else if (key === "t") train();
  else if (key === "delete" || key === "backspace") clear();
});

// What the page shows

/** Returns a small picture of what the network sees of a drawing. */
function picture({ pixels, held }) {
  const made = element("canvas", "", { width: 8, height: 8, class: held ? "held" : "" });
  const context = made.getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--ink");
  pixels.forEach((value, i) => {
    context.globalAlpha = value;
    context.fillRect(i % 8, i >> 3, 1, 1);
  });
  return made;
}

function showDrawings() {
  for (let label = 0; label < CLASSES; ++label) {
    const own = drawings.filter((drawing) => drawing.label === label);
    const held = own.filter((drawing) => drawing.held).length;
    find(`kept${label}`).replaceChildren(...own.map(picture));
    find(`kept${label}`).setAttribute("aria-label", `${own.length} drawings, ${held} held back`);
  }
  showBusy();
  evaluate();
  guess();
}

function showBusy() {
  document.documentElement.dataset.state = controller ? "training" : "ready";
  find("train").textContent = controller ? "Stop" : `Train ${STEPS} steps`;
  find("train").disabled = false;
  for (const id of ["save", "reset", "load"]) find(id).disabled = controller !== null;
  for (const id of ["undo", "keep"]) find(id).disabled = controller !== null || !drawings.length;
}

for (let label = 0; label < CLASSES; ++label) {
  find("bars").append(element("b"), element("i"), element("span"));
  const row = element("div", "", { class: "class" });
  const name = element("input", "", { type: "text", id: `name${label}`, maxlength: 30,
    placeholder: `class ${label + 1}`, "aria-label": `The name of class ${label + 1}` });
  name.addEventListener("input", () => { evaluate(); guess(); });
  const button = element("button", "Add the drawing", { type: "button" });
  button.addEventListener("click", () => add(label));
  row.append(name, button, element("div", "", { class: "kept", id: `kept${label}`, role: "img" }));
  find("classes").append(row);
}
find("clear").addEventListener("click", clear);
find("train").addEventListener("click", train);
find("undo").addEventListener("click", () => guarded(async () => {
  drawings.pop();
  showDrawings();
}));
find("reset").addEventListener("click", () => guarded(async () => {
  restart(state);
  showDrawings();
}));
find("save").addEventListener("click", () =>
  guarded(async () => download(trainer.save(), "state.safetensors")));
find("keep").addEventListener("click", () =>
  guarded(async () => download(fileOfDrawings(), "drawings.json")));
find("load").addEventListener("change", async ({ target }) => {
  const files = [...target.files];
  target.value = "";
  if (files.length) await upload(files);
});
find("theme").addEventListener("click", showDrawings); // after the theme changed

await guarded(async () => {
  trainer = await open({ manifest, module, state });
  trainer.addEventListener("progress", ({ detail }) => noted(detail));
  showNumbers();
  showDrawings();
});
