"use strict";
// Photographs open large, by a click or by Enter; the arrows move on, Escape closes.
(() => {
  const photos = [...document.querySelectorAll(".photo")];
  const viewer = document.getElementById("viewer"), body = viewer.querySelector(".view"), place = viewer.querySelector(".place");
  // Of one that stands twice only the first has all that is known of it.
  const whole = (photo) => photos.find((other) => other.dataset.key && other.dataset.key === photo.dataset.key) ?? photo;
  let group = [], at = 0;

  function show(index) {
    at = (index + group.length) % group.length;
    const photo = whole(group[at]), more = photo.querySelector(".more").cloneNode(true);
    more.hidden = false;
    body.replaceChildren(photo.querySelector("button > *").cloneNode(true), more);
    place.textContent = `${at + 1} of ${group.length}`;
  }
  for (const photo of photos) {
    photo.querySelector("button").addEventListener("click", () => {
      group = [...photo.closest(".pictures").querySelectorAll(".photo")];
      show(group.indexOf(photo));
      viewer.showModal();
    });
  }
  for (const button of viewer.querySelectorAll("[data-step]")) button.addEventListener("click", () => show(at + Number(button.dataset.step)));
  viewer.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { event.preventDefault(); show(at + step); }
  });
  viewer.addEventListener("click", (event) => { if (event.target === viewer || event.target.closest(".close")) viewer.close(); });
  viewer.addEventListener("close", () => group[at].querySelector("button").focus());
})();
