use proptest::prelude::*;

use super::*;

/// Decodes `wire` in pieces cut at `cut_positions`; returns the payload, whether it is complete, and the bytes left over.
fn decoded(wire: &[u8], cut_positions: &[usize]) -> Result<(Vec<u8>, bool, Vec<u8>), MalformedResponse> {
    let mut decoder = BodyDecoder::chunked();
    let (mut payload, mut rest) = (Vec::new(), Vec::new());
    let mut from = 0;
    for &to in cut_positions.iter().chain([&wire.len()]) {
        let mut bytes = wire[from..to].to_vec();
        from = to;
        let found = decoder.decode(&mut bytes)?;
        payload.extend_from_slice(&bytes[found.payload]);
        rest.extend_from_slice(&bytes[found.used..]);
    }
    Ok((payload, decoder.is_done(), rest))
}

#[test]
fn chunks_that_arrive_together_are_one_frame() {
    let mut decoder = BodyDecoder::chunked();
    let mut bytes = b"3\r\nabc\r\n2\r\nde\r\n4\r\nfg".to_vec();
    let found = decoder.decode(&mut bytes).unwrap();
    assert_eq!((&bytes[found.payload], found.used), (&b"abcdefg"[..], bytes.len()));
    let mut bytes = b"hi\r\n0\r\n\r\nnext".to_vec();
    let found = decoder.decode(&mut bytes).unwrap();
    assert_eq!((&bytes[found.payload], &bytes[found.used..]), (&b"hi"[..], &b"next"[..]));
    assert!(decoder.is_done());
}

#[test]
fn what_came_with_the_head_is_taken_from_what_is_held() {
    let mut decoder = BodyDecoder::chunked();
    let mut buffered = Bytes::from_static(b"2\r\nhi\r\n0\r\n\r\nnext");
    assert_eq!(decoder.decode_buffered(&mut buffered).unwrap(), "hi");
    assert!(decoder.is_done());
    assert_eq!(buffered, "next");
}

#[test]
fn a_body_of_known_length_ends_where_it_was_said() {
    let mut decoder = BodyDecoder::Length(5);
    let mut buffered = Bytes::from_static(b"abc");
    assert_eq!(decoder.decode_buffered(&mut buffered).unwrap(), "abc");
    assert_eq!((buffered.len(), decoder.remaining()), (0, Some(2)));
    assert_eq!(decoder.decode(&mut b"denext".to_vec()).unwrap(), DecodedBytes { payload: 0..2, used: 2 });
    assert!(decoder.is_done());
}

#[test]
fn what_is_not_chunked_is_refused() {
    for wire in [
        "\r\n",
        "x\r\n",
        "-1\r\n",
        "3\nabc",
        "3\r\nabcd\r\n",
        "3\r\nabc\n",
        "1234567890123456\r\n",
        "3;\n",
        "0\r\n\rx",
        " 3\r\n",
    ] {
        assert_eq!(decoded(wire.as_bytes(), &[]), Err(MalformedResponse), "{wire:?}");
    }
    let endless = format!("3;{}", "x".repeat(MAX_FRAMING_BYTES + 1));
    assert_eq!(decoded(endless.as_bytes(), &[]), Err(MalformedResponse));
}

proptest! {
    #[test]
    fn any_cutting_gives_the_payload(
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..8),
        extension in "(;[a-z=\"]{0,8})?",
        trailers in prop::collection::vec("[a-z]{1,5}: [ -~]{0,9}", 0..3),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let mut wire = Vec::new();
        for chunk in &chunks {
            wire.extend_from_slice(format!("{:X}{extension}\r\n", chunk.len()).as_bytes());
            wire.extend_from_slice(chunk);
            wire.extend_from_slice(b"\r\n");
        }
        wire.extend_from_slice(b"0\r\n");
        for trailer in &trailers {
            wire.extend_from_slice(format!("{trailer}\r\n").as_bytes());
        }
        wire.extend_from_slice(b"\r\nnext");
        let mut cut_positions: Vec<usize> = cuts.iter().map(|cut| cut.index(wire.len())).collect();
        cut_positions.sort_unstable();
        let (payload, done, rest) = decoded(&wire, &cut_positions).unwrap();
        prop_assert_eq!(payload, chunks.concat());
        prop_assert!(done);
        prop_assert_eq!(rest, b"next");
    }

    #[test]
    fn no_bytes_make_it_panic(wire in prop::collection::vec(any::<u8>(), 0..100)) {
        drop(decoded(&wire, &[]));
    }
}
