// The data, and how elements are made: text goes in as text, never as markup.
let doc = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "width%") node.style.width = value + "%";
    else if (name === "flex") node.style.flex = value;
    else if (name === "height-px") node.style.height = value + "px";
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}
const el = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
const sv = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);
const fill = (node, ...children) => { node.replaceChildren(...children.flat(Infinity).filter((c) => c)); return node; };
const empty = (text) => el("p", { class: "empty" }, text);

// A row of the table by the names of its columns.
let at = {};
function named() { at = Object.fromEntries(doc.columns.row.map((name, i) => [name, i])); }
named();
const get = (row, name) => row[at[name]];
const shapeName = (row) => get(row, "key").filter((v) => typeof v === "number").join("x");

// A backend keeps its colour and its mark on every picture.
const MARKED = { asm: 0, ck: 1, triton: 2, gluon: 3, hipblaslt: 4, cktile: 5, flydsl: 6, torch: 1, cublaslt: 4, opus: 3, skinny: 5 };
const mark = (name) => (name in MARKED ? MARKED[name] : 7);
const label = (name) => (doc.backends.find((b) => b.name === name) || { label: name }).label;
