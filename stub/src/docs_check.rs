//! Checks `docs/stub.md` against the program, and the program against the page: flags with their environment variables
//! and defaults, and paths with their methods.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use axum::{Router, body::Body};
use clap::{Arg, CommandFactory as _};
use http::{Method, Request, header};
use tower_service::Service as _;

use crate::cli;

/// One table row, keyed by column heading.
type DocsTableRow = BTreeMap<String, String>;

/// The page's section about one role.
pub(crate) struct StubDocsSection {
    role: &'static str,
    text: String,
}

impl StubDocsSection {
    pub(crate) fn load(role: &'static str, heading: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let page = std::fs::read_to_string(root.join("docs/stub.md")).unwrap();
        let (_, text) = page.split_once(&format!("\n## {heading}\n")).expect("a section of that heading");
        Self { role, text: text.split("\n## ").next().unwrap().to_owned() }
    }

    /// Returns the rows of all tables that have this column.
    fn rows(&self, column: &str) -> Vec<DocsTableRow> {
        let lines: Vec<&str> = self.text.lines().collect();
        let tables = lines.split(|line| !line.starts_with('|')).filter(|table| table.len() > 2);
        tables.flat_map(rows).filter(|row| row.contains_key(column)).collect()
    }

    /// Asserts that the tables list exactly the role's flags. Each needs its environment variable and default.
    pub(crate) fn assert_flags_documented(&self) {
        let command = cli::StubArgs::command();
        let role = command.find_subcommand(self.role).expect("a role of that name");
        let flags: BTreeMap<String, &Arg> = role
            .get_arguments()
            .filter(|arg| arg.get_id() != "help")
            .filter_map(|arg| Some((format!("--{}", arg.get_long()?), arg)))
            .collect();
        let documented: BTreeMap<String, String> = self
            .rows("Flag")
            .into_iter()
            .flat_map(|row| {
                let text = row.values().map(String::as_str).collect::<Vec<_>>().join(" | ");
                code_spans(&row["Flag"])
                    .filter_map(|span| flag_name(&span))
                    .map(|flag| (flag, text.clone()))
                    .collect::<Vec<_>>()
            })
            .collect();
        assert!(documented.len() > 10, "{documented:?}");
        assert_eq!(documented.keys().collect::<Vec<_>>(), flags.keys().collect::<Vec<_>>());
        for (flag, arg) in flags {
            let text = &documented[&flag];
            let variable = arg.get_env().map(|name| name.to_str().unwrap().to_owned());
            let default = arg.get_default_values().iter().map(|value| value.to_str().unwrap().to_owned());
            // A switch defaults to off, which the page need not state.
            for expected in variable.into_iter().chain(default.filter(|word| word != "false")) {
                let words = text.split(|c: char| !(c.is_alphanumeric() || "_.-".contains(c)));
                let found =
                    words.clone().any(|shown| shown == expected) || text.contains(&format!("`{expected}`"));
                assert!(found, "{flag}: {expected} is not said in {text}");
            }
        }
    }

    /// Asserts that the table below this heading lists exactly the port's paths. Each needs its methods.
    pub(crate) async fn assert_paths_documented(&self, heading: &str, router: Router) {
        let (_, below) =
            self.text.split_once(&format!("\n### {heading}\n")).expect("a table of the port's paths");
        let below = Self { role: self.role, text: below.split("\n### ").next().unwrap().to_owned() };
        let mut documented = BTreeMap::<String, BTreeSet<String>>::new();
        for row in below.rows("Path") {
            for (path, methods) in paths(&row["Path"]) {
                documented.entry(path).or_default().extend(methods);
            }
        }
        let mut served = BTreeMap::new();
        for path in routes(&router) {
            let methods = methods(router.clone(), &path).await;
            served.insert(path, methods);
        }
        assert_eq!(documented, served, "{heading}");
    }
}

fn rows(table: &[&str]) -> Vec<DocsTableRow> {
    let cells = |line: &str| -> Vec<String> {
        let inner = line.trim().trim_start_matches('|').trim_end_matches('|');
        inner.split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let columns = cells(table[0]);
    table[2..].iter().map(|line| columns.iter().cloned().zip(cells(line)).collect()).collect()
}

/// Returns the texts between backquotes.
fn code_spans(text: &str) -> impl Iterator<Item = String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>().into_iter()
}

/// Returns the flag's name; `--relay-port-1` becomes `--relay-port`.
fn flag_name(span: &str) -> Option<String> {
    let flag = span.split(['=', ' ']).next()?;
    let numbered = flag.rsplit_once('-').filter(|(_, number)| number.parse::<u16>().is_ok());
    flag.starts_with("--").then(|| numbered.map_or(flag, |(flag, _)| flag).to_owned())
}

/// Parses a cell like `GET`, `PUT /a`, or `POST /b`, `/c`. A path without a method has the methods of the path before
/// it.
fn paths(cell: &str) -> Vec<(String, BTreeSet<String>)> {
    let (mut found, mut methods, mut fresh) = (Vec::new(), BTreeSet::new(), true);
    for span in code_spans(cell) {
        for word in span.split(' ') {
            if let Some(path) = word.starts_with('/').then(|| word.split('?').next()).flatten() {
                found.push((path.to_owned(), methods.clone()));
                fresh = true;
            } else {
                if std::mem::take(&mut fresh) {
                    methods.clear();
                }
                methods.insert(word.to_owned());
            }
        }
    }
    found
}

/// Lists a router's paths from its `Debug` output, the only place that shows them. The registered paths come first.
fn routes(router: &Router) -> BTreeSet<String> {
    let printed = format!("{router:?}");
    let (given, _) = printed.split_once("fallback_router").expect("paths, and what is done for all others");
    let paths = given.split('"').skip(1).step_by(2).filter(|word| word.starts_with('/'));
    let paths: BTreeSet<String> = paths.map(str::to_owned).collect();
    assert!(!paths.is_empty(), "{printed}");
    paths
}

/// Finds a path's methods by sending an unknown method and reading `Allow`. `HEAD` is left out, since every `GET` route
/// has it.
async fn methods(mut router: Router, path: &str) -> BTreeSet<String> {
    let nobodys = Method::from_bytes(b"NOBODYS").unwrap();
    let request =
        Request::builder().method(nobodys).uri(path.replace(['{', '}'], "")).body(Body::empty()).unwrap();
    let answer = router.call(request).await.unwrap();
    let allow = answer.headers().get(header::ALLOW).unwrap_or_else(|| panic!("{path}: {}", answer.status()));
    let allow = allow.to_str().unwrap().split(',').map(|method| method.trim().to_owned());
    allow.filter(|method| method != "HEAD").collect()
}

#[test]
fn cells_are_read_as_people_read_them() {
    let read = |cell: &str| {
        let row = |(path, methods): (String, BTreeSet<String>)| format!("{path} {methods:?}");
        paths(cell).into_iter().map(row).collect::<Vec<_>>()
    };
    assert_eq!(read("`GET`, `PUT /a`"), [r#"/a {"GET", "PUT"}"#]);
    assert_eq!(read("`POST /b?x=N`, `/c`"), [r#"/b {"POST"}"#, r#"/c {"POST"}"#]);
    assert_eq!(read("`POST /b`, `GET /c`"), [r#"/b {"POST"}"#, r#"/c {"GET"}"#]);
    assert_eq!(flag_name("--relay-port-12=8000").as_deref(), Some("--relay-port"));
    assert_eq!(
        (flag_name("--accelerators-file").as_deref(), flag_name("PROBES_PORT")),
        (Some("--accelerators-file"), None)
    );
    let table = ["| Port | Flag | |", "|---|---|---|", "| a | `--x`: 1 | says |"];
    let row = rows(&table).remove(0);
    assert_eq!((row["Port"].as_str(), row["Flag"].as_str(), row[""].as_str()), ("a", "`--x`: 1", "says"));
}
