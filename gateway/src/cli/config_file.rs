//! Writes a configuration file as a whole or not at all.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown},
    path::Path,
};

/// Writes the file. It never replaces a file unless that is asked for, even one that appears meanwhile.
///
/// A replaced file keeps its mode and its owner, and a link to it stays a link.
///
/// # Errors
/// The file exists and `replace` is off, the folder cannot be written, or this user may not give the file to its owner.
pub(super) fn write(path: &Path, text: &str, replace: bool) -> io::Result<()> {
    let replaced = if replace { path.canonicalize().ok() } else { None };
    let path = replaced.as_deref().unwrap_or(path);
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::IsADirectory))?;
    let temporary = path.with_file_name(format!(".{}.{}.new", name.to_string_lossy(), std::process::id()));
    let written = write_through(&temporary, text, path, replace);
    if written.is_err() {
        // The error that matters is the first one.
        fs::remove_file(&temporary).unwrap_or_default();
    }
    written
}

fn write_through(temporary: &Path, text: &str, path: &Path, replace: bool) -> io::Result<()> {
    let replaced = if replace { fs::metadata(path).ok() } else { None };
    // The text may hold secrets, so the new file gets no more readers than the old one.
    let mode = if replaced.is_some() { 0o600 } else { 0o666 };
    let mut file = File::options().write(true).create_new(true).mode(mode).open(temporary)?;
    file.write_all(text.as_bytes())?;
    if let Some(replaced) = replaced {
        fchown(&file, Some(replaced.uid()), Some(replaced.gid()))?;
        file.set_permissions(replaced.permissions())?;
    }
    file.sync_all()?;
    if replace {
        return fs::rename(temporary, path);
    }
    // A link, unlike a rename, fails if there is such a file.
    match fs::hard_link(temporary, path) {
        Ok(()) => fs::remove_file(temporary),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(error),
        // Some file systems have no links.
        Err(_) if path.symlink_metadata().is_err() => fs::rename(temporary, path),
        Err(_) => Err(io::ErrorKind::AlreadyExists.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn a_file_is_replaced_only_if_that_is_asked_for_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rouse.yaml");
        write(&path, "one", false).unwrap();
        assert_eq!(write(&path, "two", false).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
        write(&path, "three", true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_replaced_file_keeps_its_mode_and_its_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("real.yaml"), folder.path().join("link.yaml"));
        write(&file, "one", false).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        write(&link, "two", true).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o640);
        assert_eq!(fs::read_to_string(&file).unwrap(), "two");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(write(&folder.path().join("absent/rouse.yaml"), "", true).is_err());
        assert!(write(Path::new("/"), "", true).is_err());
    }
}
