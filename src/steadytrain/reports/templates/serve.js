// Pictures that are dropped, chosen or pasted go to /predict one by one; names and classes are always set as text.
const at = (id) => document.getElementById(id);
const share = (value) => curves.percent(value).toFixed(1);
let explains = false;
let token = sessionStorage.getItem("token") ?? "";
const authorized = (headers) => ({ ...headers, ...(token ? { authorization: `Bearer ${token}` } : {}) });

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: authorized(options.headers) });
  if (response.status === 401) {
    at("access").hidden = false;
    at("token").focus();
  }
  const document_ = await response.json();
  if (!response.ok && !document_.images) throw new Error(document_.error ?? `the server answers ${response.status}`);
  return document_;
}

function alarm(error) {
  at("alarm").textContent = error ? `${error.message ?? error}` : "";
  at("alarm").hidden = !error;
}

async function describe() {
  try {
    const model = await ask("/model");
    explains = !model.no_maps;
    const of = model.best == null ? model.name : `${model.data}: ${share(model.best)} % ${model.metric === "top1" ? "top-1" : "mAP"}`;
    at("model").textContent = document.title = of;
    const interval = model.best_95?.[0] == null ? [] : [`95 % interval ${share(model.best_95[0])} to ${share(model.best_95[1])}`];
    const licence = model.licence ? [`licence ${model.licence}`] : [];
    const parts = [...interval, ...(of === model.name ? [] : [model.name]), `${model.num_classes.toLocaleString("en")} class${model.num_classes === 1 ? "" : "es"}`, `${model.size} px`, `version ${model.version}`, ...licence];
    at("facts").textContent = parts.join(" · ");
    at("access").hidden = true;
    if (model.example) await offerExample();
    alarm();
  } catch (error) {
    at("facts").textContent = "";
    alarm(error);
  }
  document.body.dataset.ready = "";
}

// An image of the run, to try without one at hand.
async function offerExample() {
  const response = await fetch("/example", { headers: authorized() });
  if (!response.ok) return;
  const file = new File([await response.blob()], "example.jpg", { type: "image/jpeg" });
  at("example").querySelector("img").src = URL.createObjectURL(file);
  at("example").querySelector("button").onclick = () => classify(file);
  at("example").hidden = false;
}

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function row({ class: name, probability }) {
  const line = element("p", "", "class");
  const bar = element("meter");
  bar.value = probability;
  bar.setAttribute("aria-label", name);
  line.append(element("span", name), element("b", `${share(probability)} %`), bar);
  return line;
}

const send = (file, options = "") =>
  ask(`/predict${options}`, { method: "POST", headers: { "content-type": "application/octet-stream" }, body: file });

// A button that shows the picture under the heat map of its first class, and the picture itself again.
function whyButton(file, picture, name) {
  const button = element("button", "Why?", "why"), note = element("p", "", "quiet"), box = element("div");
  const press = (pressed) => button.setAttribute("aria-pressed", pressed);
  const hide = () => {
    [picture.src, picture.alt, note.textContent] = [URL.createObjectURL(file), "", ""];
    press(false);
  };
  const show = async () => {
    [button.disabled, note.textContent, note.className] = [true, "computing", "quiet"];
    try {
      picture.src = (await send(file, "?top=1&explain=1")).images[0].map;
      [picture.alt, note.textContent] = [`${file.name}: where the answer ${name} came from`, document.body.dataset.meaning];
      press(true);
    } catch (error) {
      [note.textContent, note.className] = [error.message, "bad"];
    }
    button.disabled = false;
  };
  button.onclick = () => (button.getAttribute("aria-pressed") === "true" ? hide() : show());
  press(false);
  box.append(button, note);
  return box;
}

async function classify(file) {
  const item = element("li"), picture = element("img"), side = element("div");
  picture.alt = "";
  picture.onload = picture.onerror = () => URL.revokeObjectURL(picture.src);
  picture.src = URL.createObjectURL(file);
  side.append(element("h2", file.name), element("p", "classifying", "quiet"));
  item.append(picture, side);
  at("answers").prepend(item);
  try {
    const answer = await send(file);
    const { classes, error, note, unlike, sure } = answer.images[0];
    side.lastChild.remove();
    if (error) side.append(element("p", error, "bad"));
    else if (classes.length) side.append(...classes.map(row));
    else side.append(element("p", "no label above the threshold", "quiet"));
    if (note) side.append(element("p", note, "quiet"));
    if (sure === false) side.append(element("p", "not sure", "bad"));
    if (unlike) side.append(element("p", "unlike the training images", "bad"));
    if (explains && classes.length) side.append(whyButton(file, picture, classes[0].class));
    alarm();
  } catch (error) {
    side.lastChild.remove();
    side.append(element("p", error.message, "bad"));
  }
  item.dataset.answered = "";
}

async function classifyAll(files) {
  for (const file of files) await classify(file);
}

// The page of the interface: each form sends what it holds and shows the answer as it came.
async function tryOut(form) {
  const { method, path } = form.dataset, area = form.querySelector("textarea"), out = form.querySelector("pre");
  const body = method === "GET" ? undefined : area ? area.value : new FormData(form), began = performance.now();
  [out.hidden, out.textContent] = [false, "waiting for the answer"];
  try {
    const response = await fetch(path, { method, body, headers: authorized(area ? { "content-type": "application/json" } : {}) });
    const type = response.headers.get("content-type") ?? "", isJson = type.includes("json");
    const text = type.startsWith("image/") ? `${type}, ${(await response.blob()).size} bytes` : await response.text();
    out.textContent = `${response.status} ${response.statusText}, ${Math.round(performance.now() - began)} ms\n${isJson ? JSON.stringify(JSON.parse(text), null, 2) : text}`;
    at("access").hidden = response.status !== 401;
  } catch (error) {
    out.textContent = error.message;
  }
}
for (const form of document.querySelectorAll("form[data-path]")) {
  form.addEventListener("submit", (event) => { event.preventDefault(); tryOut(form); });
  form.querySelector("[data-fill]")?.addEventListener("change", ({ target }) => {
    const reader = new FileReader();
    reader.onload = () => { form.querySelector("textarea").value = JSON.stringify({ image: reader.result.split(",")[1], top: 3 }); };
    if (target.files[0]) reader.readAsDataURL(target.files[0]);
  });
}

if (at("drop")) {
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      at("drop").classList.toggle("over", kind === "dragenter" || kind === "dragover");
      if (kind === "drop") classifyAll([...event.dataTransfer.files]);
    });
  }
  document.addEventListener("paste", (event) => classifyAll([...event.clipboardData.files]));
  at("files").addEventListener("change", (event) => {
    classifyAll([...event.target.files]);
    event.target.value = "";
  });
}
at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token").value;
  sessionStorage.setItem("token", token);
  at("access").hidden = true;
  if (at("drop")) describe();
});
if (at("drop")) describe();
