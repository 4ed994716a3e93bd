package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// CA signs certificates of a test.
type CA struct {
	// Pool has the CA's certificate; PEM is the same as text.
	Pool *x509.CertPool
	PEM  []byte

	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewCA returns a new CA, which no system trusts.
func NewCA(tb testing.TB) *CA {
	tb.Helper()
	ca := &CA{Pool: x509.NewCertPool(), key: newKey(tb)}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "a CA of the tests"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, ca.key.Public(), ca.key)
	if err == nil {
		ca.cert, err = x509.ParseCertificate(der)
	}
	Must(tb, err)
	ca.Pool.AddCert(ca.cert)
	ca.PEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return ca
}

// Issue returns a certificate and its key in PEM, valid for 24 hours for a server at 127.0.0.1 and localhost and for
// a client, unless change modifies it.
func (ca *CA) Issue(tb testing.TB, change ...func(c *x509.Certificate)) (cert, key []byte) {
	tb.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	Must(tb, err)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "a certificate of the tests"},
		NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, c := range change {
		c(template)
	}
	own := newKey(tb)
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, own.Public(), ca.key)
	Must(tb, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(own)
	Must(tb, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

// Pair is Issue as a tls.Certificate.
func (ca *CA) Pair(tb testing.TB, change ...func(c *x509.Certificate)) tls.Certificate {
	tb.Helper()
	pair, err := tls.X509KeyPair(ca.Issue(tb, change...))
	Must(tb, err)
	return pair
}

// Files writes a certificate, its key and the CA's certificate to a folder, and returns their paths.
func (ca *CA) Files(tb testing.TB, dir string, change ...func(c *x509.Certificate)) (cert, key, caFile string) {
	tb.Helper()
	certPEM, keyPEM := ca.Issue(tb, change...)
	return WriteFile(tb, dir, "tls.crt", certPEM), WriteFile(tb, dir, "tls.key", keyPEM),
		WriteFile(tb, dir, "ca.crt", ca.PEM)
}

// Expired makes a certificate expired.
func Expired(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Hour) }

// Elsewhere makes a certificate valid for another host only.
func Elsewhere(c *x509.Certificate) { c.IPAddresses, c.DNSNames = nil, []string{"elsewhere.example"} }

// WriteFile writes a file that only its owner may read, and returns its path.
func WriteFile(tb testing.TB, dir, name string, content []byte) string {
	tb.Helper()
	path := filepath.Join(dir, name)
	Must(tb, os.WriteFile(path, content, 0o600))
	return path
}

func newKey(tb testing.TB) *ecdsa.PrivateKey {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	Must(tb, err)
	return key
}
