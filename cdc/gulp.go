package cdc

import (
	"errors"
	"io"
)

// gulpSize is how much is read from the socket at once. pgproto3 alone reads 8 KiB at a time.
const gulpSize = 256 << 10

// errDry is returned by gulp.Read when its buffer is used up: the caller decides when to read more, and how long to
// wait.
var errDry = errors.New("receive buffer is empty")

// gulp is between the socket and pgproto3's Frontend. Until tapped it is transparent. Then it separates reading the
// socket (fill) from parsing: Frontend.Receive never blocks, returns errDry when no complete message is left, and
// continues after the next fill.
type gulp struct {
	src    io.Reader
	buf    []byte
	r, w   int
	tapped bool
}

// tap ends the transparent phase. Bytes that the Frontend has already buffered stay valid.
func (g *gulp) tap() {
	g.tapped, g.buf = true, make([]byte, gulpSize)
}

// untap makes the reader transparent again.
func (g *gulp) untap() { g.tapped = false }

// Read implements io.Reader.
func (g *gulp) Read(p []byte) (int, error) {
	if g.r < g.w {
		n := copy(p, g.buf[g.r:g.w])
		g.r += n
		return n, nil
	}
	if g.tapped {
		return 0, errDry
	}
	return g.src.Read(p)
}

// fill reads the socket once. The caller must have used up the buffer (errDry).
func (g *gulp) fill() (int, error) {
	n, err := g.src.Read(g.buf)
	g.r, g.w = 0, n
	return n, err
}
