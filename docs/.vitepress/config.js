// The site of README.md and docs: the same files, with a search, and the three doors of the README as its menu.
// `make site` builds it, and fails where a link leads nowhere, a page is behind no door, or a page loads from elsewhere.
import fs from 'node:fs'
import path from 'node:path'
import { withMermaid } from 'vitepress-plugin-mermaid'

const root = path.resolve('..')
const repository = new Set() // the files and folders of the repository that pages link to

// doors reads "**Developers**: [a page](docs/a.md), …" from the README's last section.
const readme = fs.readFileSync('../README.md', 'utf8').split('\n## Documentation\n')[1]
const doors = [...readme.matchAll(/^\*\*(\w+)\*\*: (?:.+\n)+/gm)].map(([list, text]) => ({
  text,
  collapsed: true,
  items: [...list.matchAll(/\[([^\]]+)\]\((\S+)\.md\)/g)].map(([, text, page]) => (
    { text: text[0].toUpperCase() + text.slice(1).replace('\n', ' '), link: '/' + page })),
}))

// copied is the site's name for a file or folder of the repository. A browser shows text, and would download others.
const copied = name => 'files/' + name + (/\.(png|svg)$/.test(name) ? '' : '.txt')

// linkFiles makes links to the repository's files links to their copies. VitePress does links to pages.
function linkFiles(md) {
  md.core.ruler.push('files', ({ tokens, env }) => {
    const folder = path.dirname(env.relativePath)
    for (const link of tokens.flatMap(t => t.children ?? []).filter(t => t.type === 'link_open')) {
      const href = link.attrGet('href').replace(/\bREADME\.md/, 'index.md')
      link.attrSet('href', href)
      if (/^(\w+:|#)|\.md(#|$)/.test(href)) continue
      const name = path.join(folder, href)
      repository.add(name)
      link.attrSet('href', path.relative(folder, copied(name)))
      link.attrSet('target', '_blank') // leaves it as it is
    }
  })
}

function copyFiles(outDir) {
  for (const name of repository) {
    const from = path.join(root, name), to = path.join(outDir, copied(name))
    fs.mkdirSync(path.dirname(to), { recursive: true })
    if (fs.statSync(from).isDirectory()) fs.writeFileSync(to, fs.readdirSync(from).join('\n') + '\n')
    else fs.copyFileSync(from, to)
  }
}

// check returns the faults of the pages that were written.
function check(outDir, pages) {
  const linked = doors.flatMap(d => d.items.map(i => i.link.slice(1) + '.md'))
  const faults = pages.filter(p => p !== 'README.md' && !linked.includes(p)).map(p => `${p} is behind no door`)
  const read = file => fs.readFileSync(file, 'utf8')
  for (const name of fs.readdirSync(outDir, { recursive: true }).filter(n => n.endsWith('.html'))) {
    const file = path.join(outDir, name), html = read(file)
    for (const [tag, url] of html.matchAll(/<[^>]* (?:href|src)="([^"]+)"[^>]*>/g)) {
      if (/^\w+:/.test(url)) {
        if (!tag.startsWith('<a ')) faults.push(`${name} loads ${url}`)
        continue
      }
      const [to, id] = url.split('#')
      let target = to ? path.resolve(to[0] === '/' ? outDir : path.dirname(file), to.replace(/^\//, '')) : file
      if (to.endsWith('/')) target = path.join(target, 'index.html')
      if (!fs.existsSync(target)) faults.push(`${name} links to ${url}, which is not there`)
      else if (id && !read(target).includes(`id="${decodeURIComponent(id)}"`)) faults.push(`${name}: no heading ${url}`)
    }
  }
  return faults
}

export default withMermaid({
  title: 'posthaste',
  srcDir: '..',
  srcExclude: ['{bin,dist,tmp}/**'],
  outDir: '../bin/site',
  cacheDir: 'node_modules/.vitepress',
  rewrites: { 'README.md': 'index.md' },
  themeConfig: {
    nav: doors.map(({ text, items }) => ({ text, link: items[0].link })),
    sidebar: doors,
    outline: 'deep',
    search: { provider: 'local' },
  },
  markdown: {
    config: linkFiles,
    // GitHub's names of headings, which the links of the pages have.
    anchor: { slugify: s => s.toLowerCase().replace(/[^\p{L}\p{N} _-]/gu, '').replaceAll(' ', '-') },
  },
  vite: {
    // Pages in the root import these, too, and the root has no node_modules.
    resolve: { alias: [['vue', 'vue/dist/vue.runtime.esm-bundler.js'], ['vue/server-renderer', 'vue/server-renderer/index.mjs']]
      .map(([name, file]) => ({ find: new RegExp(`^${name}$`), replacement: path.resolve('node_modules', file) })) },
    build: { chunkSizeWarningLimit: 4096 },
  },
  buildEnd({ outDir, pages }) {
    copyFiles(outDir)
    const faults = check(outDir, pages)
    if (faults.length) throw new Error('\n' + faults.join('\n'))
  },
})
