// A page that was read once opens without a network. The network comes first: what is kept answers only where there
// is none, so that no old planner answers beside a new one.
const KEPT = "tonnage";
const FILES = []; // the build names them

const here = (name) => new URL(name, self.registration.scope).href;

oninstall = (event) => event.waitUntil(caches.open(KEPT).then((kept) => kept.addAll(FILES.map(here))));

onfetch = (event) => {
  const address = new URL(event.request.url);
  address.search = ""; // a link is a plan, of the same page
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
