//! Gzip without compression: stored blocks only. A decoding client sees no difference, and a proxy that passes bytes on
//! unread gets an opaque coding, which is the purpose of the fault.

pub(crate) struct Gzip {
    crc: u32,
    length: u32,
    begun: bool,
}

impl Gzip {
    pub(crate) fn new() -> Self {
        Self { crc: u32::MAX, length: 0, begun: false }
    }

    /// `data` as a flushed part of the member, decodable on arrival.
    pub(crate) fn part(&mut self, data: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(data.len() + 32);
        if !std::mem::replace(&mut self.begun, true) {
            out.extend_from_slice(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255]);
        }
        for block in data.chunks(usize::from(u16::MAX)) {
            let length = block.len() as u16;
            out.push(0);
            out.extend_from_slice(&length.to_le_bytes());
            out.extend_from_slice(&(!length).to_le_bytes());
            out.extend_from_slice(block);
        }
        self.crc = data.iter().fold(self.crc, |crc, byte| step(crc ^ u32::from(*byte)));
        self.length = self.length.wrapping_add(data.len() as u32);
        out
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        let mut out = self.part(&[]);
        out.extend_from_slice(&[1, 0, 0, 0xff, 0xff]);
        out.extend_from_slice(&(!self.crc).to_le_bytes());
        out.extend_from_slice(&self.length.to_le_bytes());
        out
    }
}

fn step(crc: u32) -> u32 {
    (0..8).fold(crc, |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32() {
        let mut gzip = Gzip::new();
        gzip.part(b"12345");
        gzip.part(b"6789");
        let end = gzip.end();
        assert_eq!(end[5..], [0x26, 0x39, 0xf4, 0xcb, 9, 0, 0, 0]);
    }
}
