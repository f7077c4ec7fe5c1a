// The order of what the site's search finds.  Sphinx loads this file after its own Search.

// Sphinx takes titles of sections only if a search names half of their letters.  Here a section is
// found by any words of its title, so that a hit leads to the paragraph and not to the top of a page.
const termsSearch = Search.performTermsSearch;
Search.performTermsSearch = (searched, excluded) => {
  const { alltitles, docnames, filenames, titles } = Search._index;
  const stemmer = new Stemmer();
  const found = [];
  for (const [title, places] of Object.entries(alltitles)) {
    const words = new Set(splitQuery(title.toLowerCase()).map((word) => stemmer.stemWord(word)));
    if (!searched.size || ![...searched].every((word) => words.has(word))) continue;
    const score = Math.round((Scorer.title * searched.size) / words.size);
    for (const [page, anchor] of places) {
      const top = anchor === null;
      found.push([docnames[page], top ? title : `${titles[page]} > ${title}`, top ? "" : "#" + anchor,
        null, score, filenames[page], SearchResultKind.title]);
    }
  }
  return [...found, ...termsSearch(searched, excluded)];
};

// First the object of exactly this name, then titles, then other objects, then texts; developers'
// pages after all others.
Scorer = {
  ...Scorer,
  objNameMatch: 130,
  objPartialMatch: 50,
  score: ([page, title, anchor, descr, score, file, kind]) =>
    score + (kind === "title" ? 100 : 0) - (page.startsWith("dev/") ? 1000 : 0),
};
