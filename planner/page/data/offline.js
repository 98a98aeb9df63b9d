// Service worker that lets a visited page open offline. It prefers the network and uses stored files only without
// it, so that files of different versions are never mixed.
const KEPT = "tonnage";
const FILES = []; // filled in by page/build.py

const here = (name) => new URL(name, self.registration.scope).href;

oninstall = (event) => event.waitUntil(caches.open(KEPT).then((kept) => kept.addAll(FILES.map(here))));

onfetch = (event) => {
  const address = new URL(event.request.url);
  address.search = ""; // the query holds a plan; the page is the same
  if (event.request.method === "GET" && FILES.some((name) => here(name) === address.href)) {
    event.respondWith(answer(event.request, address.href));
  }
};

async function answer(request, name) {
  const kept = await caches.open(KEPT);
  try {
    const found = await fetch(request);
    if (found.ok) await kept.put(name, found.clone());
    return found;
  } catch (error) {
    const found = await kept.match(name);
    if (found) return found;
    throw error;
  }
}
