// Program fulltests prints, as arguments of go test, the tests that POSTHASTE_TEST_FULL changes, and their packages:
// tests that mention the variable, directly or through other functions of their package's tests. make test-full runs
// those; make test runs all others unchanged. It goes by names, so it may list a test too many, but never misses one.
// Its arguments are packages to list first.
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const variable = `"POSTHASTE_TEST_FULL"`

func main() {
	packages := map[string]uses{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		dir := filepath.Dir(path)
		if packages[dir] == nil {
			packages[dir] = uses{}
		}
		return packages[dir].read(path)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "fulltests:", err)
		os.Exit(1)
	}
	var tests, dirs []string
	for dir, u := range packages {
		if list := u.tests(); len(list) > 0 {
			tests, dirs = append(tests, list...), append(dirs, "./"+filepath.ToSlash(dir))
		}
	}
	slices.Sort(tests)
	slices.Sort(dirs)
	dirs = slices.Concat(os.Args[1:], dirs)
	fmt.Printf("-run ^(%s)$ %s\n", strings.Join(slices.Compact(tests), "|"), strings.Join(dirs, " "))
}

// uses maps each function and variable of a package's tests to the names it mentions.
type uses map[string]map[string]bool

func (u uses) read(path string) error {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			u.note(d.Name.Name, d)
		case *ast.GenDecl:
			for _, s := range d.Specs {
				if v, ok := s.(*ast.ValueSpec); ok {
					for _, name := range v.Names {
						u.note(name.Name, v)
					}
				}
			}
		}
	}
	return nil
}

func (u uses) note(name string, n ast.Node) {
	if u[name] == nil {
		u[name] = map[string]bool{}
	}
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			u[name][n.Name] = true
		case *ast.BasicLit:
			u[name][n.Value] = true
		}
		return true
	})
}

// tests returns those that mention the variable, directly or indirectly.
func (u uses) tests() (list []string) {
	seen := map[string]bool{variable: true}
	for next := []string{variable}; len(next) > 0; next = next[1:] {
		for name, mentioned := range u {
			if mentioned[next[0]] && !seen[name] {
				seen[name] = true
				next = append(next, name)
				if strings.HasPrefix(name, "Test") {
					list = append(list, name)
				}
			}
		}
	}
	return list
}
