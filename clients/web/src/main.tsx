import { render } from "preact";
import { App } from "./app/App";
import { Page, PageContext } from "./state/page";

const page = new Page();
const root = document.getElementById("app");
if (!root) throw new Error("index.html has no element #app");
render(
  <PageContext.Provider value={page}>
    <App />
  </PageContext.Provider>,
  root,
);
page.start();
