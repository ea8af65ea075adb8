// Leaves empty fields out of a filter form's address, so that a link shows what was asked.
export function shortAddresses() {
  for (const form of document.querySelectorAll("form.filters")) {
    form.addEventListener("formdata", ({ formData }) => {
      for (const [name, value] of [...formData]) if (value === "") formData.delete(name);
    });
  }
}
