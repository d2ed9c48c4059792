//! The fenced blocks of a page, in Markdown. A block's tag names the test that checks it (`gateway/tests/it/docs.rs`).

/// A fenced block.
#[derive(Clone, Debug)]
pub struct PageBlock {
    /// The line of its opening fence, from 1.
    pub line: usize,
    /// What follows the fence, such as `sh helm`.
    pub tag: String,
    /// Its lines, each with its newline.
    pub text: String,
}

/// Returns the blocks of a page, in order.
///
/// # Panics
/// A block does not end.
#[must_use]
pub fn blocks(page: &str) -> Vec<PageBlock> {
    let mut blocks = Vec::new();
    let mut open: Option<PageBlock> = None;
    for (number, line) in page.lines().enumerate() {
        match (line.strip_prefix("```"), open.as_mut()) {
            (Some(tag), None) => {
                open = Some(PageBlock { line: number + 1, tag: tag.trim().to_owned(), text: String::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block does not end: {open:?}");
    blocks
}

/// Returns the texts of the blocks with this tag, in order.
///
/// # Panics
/// A block does not end.
#[must_use]
pub fn tagged(page: &str, tag: &str) -> Vec<String> {
    let blocks = blocks(page).into_iter().filter(|block| block.tag == tag);
    blocks.map(|block| block.text).collect()
}
