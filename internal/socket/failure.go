package socket

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
)

// Failure describes why a connection failed, as a predicate whose subject is the server: "refuses the connection". It
// is "" if err is no failure of a connection.
func Failure(err error) string {
	var certificate *tls.CertificateVerificationError
	var op *net.OpError
	var network net.Error
	var system *os.SyscallError
	switch {
	case errors.As(err, new(*net.DNSError)):
		return "cannot be found: the name of the host is unknown"
	case errors.As(err, &certificate):
		if errors.As(err, new(x509.UnknownAuthorityError)) {
			return "has a certificate of an unknown CA"
		}
		return "has a certificate that is not valid: " + strings.TrimPrefix(certificate.Err.Error(), "x509: ")
	case errors.As(err, new(tls.RecordHeaderError)):
		return "offers no TLS"
	case errors.As(err, &op) && op.Op == "remote error":
		return "does not accept the certificate of this client"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refuses the connection"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network) && network.Timeout():
		return "does not answer in time"
	case Lost(err):
		return "closes the connection"
	case errors.As(err, &system):
		return "cannot be reached: " + system.Err.Error()
	}
	return ""
}

// Lost reports whether an established connection has ended.
func Lost(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNABORTED)
}
