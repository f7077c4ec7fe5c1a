// Runs the search of a built site: node search.js SITE WORDS...
// Prints a JSON list for each search: [page#section, title] of each hit, best first.

const { readFileSync } = require("node:fs");
const { join } = require("node:path");
const vm = require("node:vm");

const [site, ...searches] = process.argv.slice(2);
const read = (name) => readFileSync(join(site, name), "utf8");

// What the scripts of the page ask of a browser when they are loaded and search.
const browser = {
  console, URLSearchParams,
  document: { getElementById: () => ({}) },
  _ready: () => {}, _: (text) => text, SPHINX_HIGHLIGHT_ENABLED: false,
};
browser.window = browser;
vm.createContext(browser);

const scripts = [...read("search.html").matchAll(/<script src="([^"?]+)/g)].map((found) => found[1]);
const needed = scripts.filter((name) => /searchtools|language_data|stemmer|searchindex/.test(name));
vm.runInContext(needed.map(read).join("\n;\n"), browser);
browser.searches = searches;
vm.runInContext(
  `for (const words of searches) {
    const hits = Search._performSearch(...Search._parseQuery(words)).reverse();
    console.log(JSON.stringify(hits.map(([page, title, anchor]) => [page + anchor, title])));
  }`,
  browser,
);
